"""The command `kerasdist plan`: a placement of a model, before anything runs."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kerasdist.cli.console import (
    Command,
    above_zero,
    json_option,
    options_of,
    read_by,
    several,
)
from kerasdist.errors import PlanError
from kerasdist.placement.plan import Plan, parse_bytes

# A plan as a JSON document: the keys of `kerasdist plan --json`.


def document_of(plan: Plan) -> dict[str, Any]:
    """Return a plan's figures as JSON has them; sizes in bytes."""
    run = plan.run
    layers: list[dict[str, Any]] = [
        {
            "path": layer.path,
            "class": layer.kind,
            "device": plan.placement[layer.path],
            "parameter_bytes": layer.parameter_bytes,
            "gradient_bytes": layer.gradient_bytes,
            "slot_bytes": layer.slot_bytes,
            "activation_bytes": round(layer.activation_bytes(run)),
            "flops": round(layer.flops(run)),
        }
        for layer in plan.layers
    ]
    work = sum(layer["flops"] for layer in layers)
    devices = []
    for number, device in enumerate(plan.devices):
        mine = layers[slice(*plan.cut.borders[number : number + 2])]
        used, limit = plan.cut.memory[number], device.memory_limit
        devices.append(
            {
                "name": device.name,
                "layers": [layer["path"] for layer in mine],
                "input_bytes": round(plan.cut.entering[number]),
                "peak_bytes": round(used),
                "memory_bytes": limit,
                "memory_source": device.found,
                "fits": limit is None or used <= limit,
                "work": sum(layer["flops"] for layer in mine) / work if work else 0.0,
            }
        )
    return {
        "fits": plan.fits,
        "batch_size": run.batch_size,
        "micro_batches": run.micro_batches,
        "rematerialize": run.rematerialize,
        "layers": layers,
        "devices": devices,
        "advice": [],
    }


def document_of_error(error: PlanError) -> dict[str, Any]:
    """Return what is known if nothing fits: the nearest plan, and what would fit."""
    nearest = document_of(error.plan) if isinstance(error.plan, Plan) else {}
    found = {"type": type(error).__name__, "message": str(error)}
    return {**nearest, "fits": False, "advice": list(error.advice), "error": found}


def _sizes(text: str) -> int | list[int]:
    sizes = [parse_bytes(part) for part in text.split(",")]
    return sizes[0] if len(sizes) == 1 else sizes


_number = above_zero(int, "an integer")
_DESCRIPTION = """\
Print what each layer of a model costs (parameters, gradients and slots, activations,
operations), the device proposed for it, and what each device would hold. No weights
are allocated, and nothing is trained. Exit code 0 if the model fits, 1 if it doesn't:
then the last lines list changes that would make it fit."""
_EPILOG = """\
examples:
  kerasdist plan train.py:build_model --batch-size 256 --optimizer adam
  kerasdist plan train.py:build_model --devices GPU:0,GPU:1 --memory 16GB \\
      --batch-size 256 --optimizer adam --micro-batches 8"""
_OPTIONS = (
    *options_of(
        """
model
    a function without arguments that returns the model: of a script, or of a module
    (package.module:function)
--devices D,D
    names as in TensorFlow, in the order of the stages; devices of another machine need
    --memory (default: all GPUs, or all CPUs)
--batch-size N
    rows of a batch
--optimizer NAME
    as in `model.compile` (default: that which the model was compiled with)
--memory SIZE
    of each device, as 16GB or 512MiB; or one for each, as 16GB,8GB (default: what the
    devices report)
--micro-batches M
    parts into which a batch is cut (default: 1)
--rematerialize
    activations are computed again in the backward pass
--input-shape N,N
    of one row, for a model that doesn't define it itself
""",
        model={"metavar": "script.py:function"},
        devices={"type": several(str)},
        batch_size={"type": _number, "required": True},
        memory={"type": read_by(_sizes)},
        micro_batches={"type": _number, "default": 1},
        input_shape={"type": several(_number)},
    ),
    json_option("the tables, with sizes in bytes"),
)


def _run(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    model_fn = _load(arguments.parser, arguments.model)
    # TensorFlow takes seconds to import: not before the arguments are right.
    from kerasdist.strategies.model_parallel import plan

    try:
        found = plan(
            model_fn,
            arguments.devices,
            batch_size=arguments.batch_size,
            optimizer=arguments.optimizer,
            micro_batches=arguments.micro_batches,
            memory_limits=arguments.memory,
            rematerialize=arguments.rematerialize,
            inputs=arguments.input_shape,
        )
    except PlanError as error:
        print(error, file=sys.stderr)
        arguments.document.update(document_of_error(error))
        return 1
    except ValueError as error:
        arguments.parser.error(str(error))
    arguments.document.update(document_of(found))
    if not arguments.json:
        print(found)
    return 0


def _load(parser: argparse.ArgumentParser, text: str) -> Callable[[], Any]:
    """Import the script or module before the colon; return the function after it."""
    where, colon, name = text.rpartition(":")
    if not (colon and where and name.isidentifier()):
        parser.error(
            "expected a script and a function, as train.py:build_model. Received: "
            f"{text!r}"
        )
    if where.endswith(".py"):
        path = Path(where).resolve()
        if not path.is_file():
            parser.error(f"there is no script {where!r} (in {os.getcwd()})")
        # As Python does for a script; not as __main__, so that it doesn't train.
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            parser.error(f"{where!r} can't be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            parser.error(f"there is no module {where!r} ({error})")
    function = getattr(module, name, None)
    if not callable(function):
        parser.error(
            f"{where} has no function {name!r}. Received: {text!r}; expected a "
            "function without arguments that returns the model"
        )
    return function


COMMAND = Command(
    name="plan",
    handler=_run,
    options=_OPTIONS,
    help="propose a device for each layer, and check that the model fits",
    description=_DESCRIPTION,
    epilog=_EPILOG,
)
