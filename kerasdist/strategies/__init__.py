"""The strategies, each a room for a part of distributed training.

Their modules are imported on request: none needs what the others need. Those of the
three classes are here, and what more than one room uses. The rooms:

`sync` is the base of strategies in step, `asynchronous` that of workers that don't wait
for each other; `reduce` has the way of a gradient, `data` that of samples; `placed` has
layers on devices, and `measure` the times of steps.
"""
