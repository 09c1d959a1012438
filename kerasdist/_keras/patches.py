"""Every function of Keras that is wrapped, by which hook, and what for.

Keras 3 was written for strategies that average equal parts, in an order of things that
isn't right for several workers. Each hook does what Keras does, unless the strategy in
use has asked for something else: see `hooks`. How a row is read is in `_tf.patching`.
docs/how_it_works.md has this table for readers, made by `python
tests/_keras/test_patches.py`.

    core                            every strategy
    learning_rate                   `ScaleLearningRate`
    placement, micro_batches,       `ModelParallelStrategy`, and every strategy with a
    rematerialize                   placement
"""

from __future__ import annotations

from kerasdist._tf.patching import Patch

__all__ = ["FITS", "TABLE"]

# What the tests have passed with.
FITS = "3.14 to 3.15"

# Keras 3.16 has other names for some: see the braces.
_LOSS = "keras.src.losses.loss"
_OPTIMIZER = "keras.src.optimizers.base_optimizer.BaseOptimizer"
_TF_OPTIMIZER = "keras.src.backend.tensorflow.optimizer.TFOptimizer"
_TRAINER = "keras.src.backend.tensorflow.trainer"
_MODEL = f"{_TRAINER}.{{TensorFlowTrainer,Trainer}}"
_BASE = "keras.src.trainers.trainer.{BaseTrainer,Trainer}"
_CALLBACKS = "keras.src.callbacks"
_LIST = f"{_CALLBACKS}.callback_list.CallbackList"
_BACKUP = f"{_CALLBACKS}.backup_and_restore.BackupAndRestore"
_BOARD = f"{_CALLBACKS}.tensorboard.TensorBoard"
_CSV = f"{_CALLBACKS}.csv_logger.CSVLogger"
_ORBAX = f"{_CALLBACKS}.orbax_checkpoint.OrbaxCheckpoint"
_ARCHIVE = "keras.src.export.saved_model.{BackendSavedModelExportArchive,ExportArchive}"
_LAYER = "keras.src.layers.layer.Layer"
_VARIABLE = "keras.src.backend.tensorflow.{core,ops.core}.Variable"
_NN = "keras.src.backend.tensorflow.{nn,ops.nn}"


def _core(hook: str, does: str, *targets: str) -> Patch:
    return Patch(hook=hook, feature="core", does=does, targets=targets)


def _placement(hook: str, does: str, *targets: str) -> Patch:
    return Patch(hook=hook, feature="placement", does=does, targets=targets)


def _again(hook: str, does: str, *targets: str) -> Patch:
    return Patch(hook=hook, feature="rematerialize", does=does, targets=targets)


def _micro(hook: str, does: str, *targets: str) -> Patch:
    return Patch(hook=hook, feature="micro_batches", does=does, targets=targets)


def _rate(hook: str, does: str, *targets: str) -> Patch:
    return Patch(hook=hook, feature="learning_rate", does=does, targets=targets)


# Of several hooks of one function the last one is the outermost.
TABLE = (
    # Losses and metrics.
    _core(
        "training.losses.keep_loss_unscaled",
        "leaves the loss: gradients are weighted by rows",
        f"{_LOSS}.scale_loss_for_distribution(value)",
    ),
    _core(
        "training.losses.reported_loss",
        "records the loss of the global batch, if it isn't a mean over rows",
        f"{_LOSS}.unscale_loss_for_distribution(value)",
    ),
    _core(
        "training.losses.average_loss",
        "doesn't divide by the number of replicas in steps of `fit`",
        "tensorflow.nn.compute_average_loss"
        "(per_example_loss, sample_weight, global_batch_size)",
    ),
    _core(
        "training.losses.regularization_loss",
        "the same",
        "tensorflow.nn.scale_regularization_loss(regularization_loss)",
    ),
    _core(
        "training.losses.reduce_values",
        "corrects losses that aren't a mean over rows: sums, weighted means",
        f"{_LOSS}.reduce_values(values, sample_weight, reduction)",
    ),
    _core(
        "training.losses.reduce_weighted_values",
        "the same for loss functions that return one number",
        f"{_LOSS}.reduce_weighted_values(values, ...)",
    ),
    _core(
        "training.losses.mask_weights",
        "counts valid entries over all replicas",
        f"{_LOSS}.apply_mask(sample_weight, mask, dtype, reduction)",
    ),
    _core(
        "training.losses.compile_loss",
        "says that the parts of a loss are recorded",
        "keras.src.trainers.compile_utils.CompileLoss.call(self, ...)",
    ),
    _core(
        "training.losses.mean_metric",
        "records the parts of a loss by the rows that they count for",
        "keras.src.metrics.reduction_metrics.Mean.update_state"
        "(self, values, sample_weight)",
    ),
    _core(
        "training.losses.additional_loss",
        "corrects what `add_loss` was given, if it isn't a mean over rows",
        f"{_MODEL}._aggregate_additional_loss(self, loss)",
    ),
    _core(
        "training.losses.gradient",
        "the same for what a `train_step` of the user's own differentiates",
        "tensorflow.python.eager.backprop.GradientTape.gradient"
        "(self, target, sources, output_gradients, ...)",
    ),
    # Optimizers.
    _core(
        "training.optimizers.apply",
        "reduces first; then Keras clips and updates",
        f"{_OPTIMIZER}.apply(self, grads, trainable_variables)",
        "keras.src.optimizers.loss_scale_optimizer.LossScaleOptimizer.apply"
        "(self, grads, trainable_variables)",
    ),
    _core(
        "training.optimizers.clip_gradients",
        "clips the sum of the replicas in a loop of one's own",
        f"{_OPTIMIZER}._clip_gradients(self, grads)",
    ),
    _core(
        "training.optimizers.accumulate",
        "accumulates gradients, and reduces in the step that updates",
        f"{_OPTIMIZER}._backend_apply_gradients(self, grads, trainable_variables)",
    ),
    _core(
        "training.optimizers.learning_rate",
        "asks a schedule for the step that it is to all workers; times the factor of "
        "`ScaleLearningRate`, if there is one",
        f"{_OPTIMIZER}._get_current_learning_rate(self)",
    ),
    _core(
        "training.optimizers.finalize",
        "takes the mean of the workers' averages (EMA) with `mode='async'`",
        f"{_OPTIMIZER}.finalize_variable_values(self, var_list)",
    ),
    _core(
        "training.optimizers.skip_all_reduce",
        "leaves gradients that have been reduced",
        f"{_TF_OPTIMIZER}._all_reduce_sum_gradients(self, grads_and_vars)",
    ),
    _core(
        "optimizer.fused_sgd.sgd_step",
        "one operation, without memory for what's between",
        "keras.src.optimizers.sgd.SGD.update_step"
        "(self, gradient, variable, learning_rate)",
    ),
    # Layers.
    _core(
        "training.layers.synchronized_moments",
        "`BatchNormalization(synchronized=True)`: one collective; gradients weighted "
        "by rows",
        f"{_NN}._compute_moments_sync(x, axes, keepdims)",
    ),
    _core(
        "training.layers.next_seed",
        "adds the replica's number to the seed: dropout differs",
        "keras.src.random.seed_generator.SeedGenerator.next(self, ...)",
    ),
    # Data, and the loops of `fit`, `evaluate` and `predict`.
    _core(
        "data.arrays.init_epoch_iterator",
        "arrays in an order that all workers agree on, each worker its rows; of a "
        "`PyDataset` its share of the items",
        f"{_TRAINER}.TFEpochIterator.__init__(self, distribute_strategy, ...)",
    ),
    _core(
        "training.train_step.reduce_per_replica",
        "predictions of all workers, in input order",
        f"{_TRAINER}.reduce_per_replica(values, strategy, reduction)",
    ),
    _core(
        "training.train_step.make_function",
        "counts a step's rows; raises the lost worker instead of a failed operation",
        f"{_MODEL}._make_function(self, step_function)",
    ),
    _core(
        "training.train_step.receive_batch",
        "takes a batch out of what our datasets put around it",
        f"{_MODEL}._autoconvert_optionals(self, step_func)",
    ),
    _core(
        "training.train_step.symbolic_build",
        "builds from a replica's batch as it is, or by tracing the model's own step",
        f"{_MODEL}._maybe_symbolic_build(self, iterator, data_batch)",
    ),
    _placement(
        "placement.auto_placement.plan_placement",
        "`placement='auto'`: plans before the first step",
        f"{_MODEL}._maybe_symbolic_build(self, iterator, data_batch)",
    ),
    _core(
        "training.fit_loop.finish_epoch",
        "metrics of all workers in logs of any structure; means of other logs, and of "
        "statistics",
        f"{_MODEL}._get_metrics_result_or_logs(self, logs)",
    ),
    _core(
        "training.fit_loop.begin_training",
        "refuses XLA with several replicas; warns of a model that was created outside "
        "of the scope",
        f"{_MODEL}.make_train_function(self, ...)",
    ),
    _core(
        "training.fit_loop.fit",
        "the start-up line; the chief's progress bar; the lost worker's name",
        f"{_MODEL}.fit(self, ..., verbose)",
    ),
    _core(
        "training.fit_loop.on_chief_only",
        "shows the progress bar on the chief alone",
        f"{_MODEL}.evaluate(self, ..., verbose)",
        f"{_MODEL}.predict(self, ..., verbose)",
    ),
    _core(
        "training.train_step.predict_on_batch",
        "each worker predicts its rows of the batch",
        f"{_MODEL}.predict_on_batch(self, x)",
    ),
    # Callbacks.
    _core(
        "training.callbacks.on_train_begin",
        "the state is checked before step 1; callbacks that communicate are on all "
        "ranks",
        f"{_LIST}.on_train_begin(self, ...)",
    ),
    _core(
        "training.callbacks.on_epoch_end",
        "the stop and the rate are agreed on",
        f"{_LIST}.on_epoch_end(self, epoch, ...)",
    ),
    _core(
        "training.callbacks.on_train_batch_end",
        "a stop in the midst of an epoch is agreed on",
        f"{_LIST}.on_train_batch_end(self, ...)",
    ),
    # Tracebacks.
    _core(
        "tracebacks.filter_frames",
        "a user's traceback shows no frames of kerasdist where Keras shows none of its "
        "own",
        "keras.src.utils.traceback_utils._process_traceback_frames(tb)",
    ),
    _core(
        "tracebacks.show_cause",
        "an error of a model that is built by its first batch ends in a user's line",
        f"{_BASE}._symbolic_build(self, ...)",
    ),
    # Placements.
    _placement(
        "placement.layers.init_layer",
        "a layer that is made in a stage belongs there",
        f"{_LAYER}._initialize_tracker(self)",
    ),
    _placement(
        "placement.layers.call_layer",
        "a layer is called, and built, on its device",
        f"{_LAYER}.__call__(self, ...)",
    ),
    _placement(
        "placement.layers.export_model",
        "what is exported has no devices",
        "keras.src.models.model.Model.export(self, ...)",
    ),
    _placement(
        "placement.layers.init_variable",
        "a variable is made on its layer's device",
        f"{_VARIABLE}.__init__(self, ...)",
    ),
    _placement(
        "placement.layers.initialize_variable",
        "the same for one that gets its value later",
        f"{_VARIABLE}._initialize(self, ...)",
    ),
    # Where it's defined: Keras takes a `compile` that it finds elsewhere for a user's
    # own.
    _placement(
        "placement.trainer.compile_model",
        "what was built by itself is moved",
        f"{_BASE}.compile(self, ...)",
    ),
    _placement(
        "placement.trainer.keep_gradients_unscaled",
        "gradients stay where they are",
        f"{_TF_OPTIMIZER}._all_reduce_sum_gradients(self, grads_and_vars)",
    ),
    _placement(
        "placement.trainer.reset_accumulators",
        "accumulators stay where they are",
        f"{_OPTIMIZER}._backend_reset_gradient_accumulators(self)",
    ),
    _placement(
        "placement.trainer.init_epoch_iterator",
        "says how many rows the next steps have",
        f"{_TRAINER}.TFEpochIterator.__init__(self, distribute_strategy, ...)",
    ),
    _placement(
        "placement.trainer.make_function",
        "patterns that match nothing are errors; the first step is reported",
        f"{_MODEL}.make_train_function(self, ...)",
        f"{_MODEL}.make_test_function(self, ...)",
        f"{_MODEL}.make_predict_function(self, ...)",
    ),
    _placement(
        "placement.trainer.name_the_lost",
        "raises the lost worker instead of a failed operation",
        f"{_MODEL}.fit(self, ...)",
        f"{_MODEL}.evaluate(self, ...)",
        f"{_MODEL}.predict(self, ...)",
        f"{_MODEL}.train_on_batch(self, ...)",
        f"{_MODEL}.test_on_batch(self, ...)",
        f"{_MODEL}.predict_on_batch(self, ...)",
    ),
    # What was created outside of the scope.
    _core(
        "training.adoption.compile_model",
        "compiles in the scope of the model's strategy; adopts what it's given",
        f"{_BASE}.compile(self, ...)",
    ),
    _core(
        "training.adoption.make_function",
        "adopts what was created outside of the scope, before a step is traced",
        f"{_MODEL}.make_train_function(self, ...)",
        f"{_MODEL}.make_test_function(self, ...)",
        f"{_MODEL}.make_predict_function(self, ...)",
    ),
    _core(
        "training.adoption.assign",
        "adopts a metric in a loop of one's own",
        f"{_VARIABLE}.assign(self, value)",
    ),
    # Around the others: a step in parts, and activations that are computed again.
    _again(
        "placement.rematerialize.call_layer",
        "a layer on one device is a segment, which is computed again",
        f"{_LAYER}.__call__(self, ...)",
    ),
    _again(
        "placement.rematerialize.run_through_graph",
        "a model is run in segments instead of layers",
        "keras.src.ops.function.Function._run_through_graph"
        "(self, inputs, operation_fn, call_fn)",
    ),
    _again(
        "placement.rematerialize.draw_seed",
        "the second time the seeds of the first",
        "keras.src.random.seed_generator.SeedGenerator.next(self, ...)",
    ),
    _again(
        "placement.rematerialize.assign",
        "the second time nothing is written",
        f"{_VARIABLE}.assign(self, value)",
    ),
    _micro(
        "placement.micro_batches.call_layer",
        "a model is called on each part of a batch",
        f"{_LAYER}.__call__(self, ...)",
    ),
    _micro(
        "placement.micro_batches.mean_metric",
        "a part's value counts by its rows",
        "keras.src.metrics.reduction_metrics.Mean.update_state"
        "(self, values, sample_weight)",
    ),
    _micro(
        "placement.micro_batches.normalize",
        "moving statistics as of one batch",
        "keras.src.layers.normalization.batch_normalization.BatchNormalization.call"
        "(self, inputs, ...)",
    ),
    # Writers of files. What they do besides is done by the chief too.
    _core(
        "files.backups.write",
        "how far training has come is kept with the backup",
        f"{_BACKUP}._save_model(self)",
    ),
    # They do nothing but write (or remove) files, or post what others would post, too.
    _core(
        "files.writers.on_chief_only",
        "the chief writes, outside of the scope",
        f"{_BACKUP}._save_model(self)",
        f"{_BACKUP}.on_train_end(self, ...)",
        f"{_CSV}.on_train_begin(self, ...)",
        f"{_CSV}.on_epoch_end(self, ...)",
        f"{_CSV}.on_train_end(self, ...)",
        f"{_CALLBACKS}.remote_monitor.RemoteMonitor.on_epoch_end(self, ...)",
        f"{_BOARD}.set_model(self, model)",
        f"{_BOARD}.on_train_begin(self, ...)",
        f"{_BOARD}.on_train_end(self, ...)",
        f"{_BOARD}.on_test_begin(self, ...)",
        f"{_BOARD}.on_test_end(self, ...)",
        f"{_BOARD}.on_train_batch_begin(self, ...)",
        f"{_BOARD}.on_train_batch_end(self, ...)",
        f"{_BOARD}.on_test_batch_begin(self, ...)",
        f"{_BOARD}.on_epoch_begin(self, ...)",
        f"{_BOARD}.on_epoch_end(self, ...)",
    ),
    # Scripts that import `save_model` before there is a strategy keep Keras's own: that
    # calls what stands in `saving_lib` and `legacy_h5_format`.
    _core(
        "files.writers.write",
        "the chief writes, outside of the scope; the others wait until it has",
        "keras.src.models.model.Model.save(self, filepath, ...)",
        "keras.src.models.model.Model.save_weights(self, filepath, ...)",
        "keras.src.models.model.Model.export(self, filepath, ...)",
        "keras.src.saving.saving_lib.save_model(model, filepath, ...)",
        "keras.src.saving.saving_lib.save_weights_only(model, filepath, ...)",
        "keras.src.legacy.saving.legacy_h5_format.save_model_to_hdf5"
        "(model, filepath, ...)",
        f"{_ARCHIVE}.write_out(self, filepath, ...)",
    ),
    _core(
        "files.writers.write_checkpoint",
        "the chief writes; the others wait until it has",
        "tensorflow.python.checkpoint.checkpoint.Checkpoint._write"
        "(self, file_prefix, options)",
    ),
    _core(
        "files.writers.write_checkpoint_state",
        "which checkpoint is a folder's latest is written by the chief",
        "tensorflow.python.checkpoint.checkpoint_management"
        ".update_checkpoint_state_internal(save_dir, model_checkpoint_path, ...)",
    ),
    _core(
        "files.writers.outside",
        "may be called on one rank alone: outside of the scope",
        "keras.src.saving.saving_lib.get_attr_skipset(obj_type)",
        f"{_ARCHIVE}.__init__(self, ...)",
        f"{_ARCHIVE}.track(self, ...)",
        f"{_ARCHIVE}.add_endpoint(self, ...)",
        f"{_ARCHIVE}.add_variable_collection(self, ...)",
    ),
    _core(
        "files.writers.save_state",
        "the chief writes what all metrics of all workers add up to",
        f"{_ORBAX}._save_checkpoint(self, ...)",
    ),
    _core(
        "files.writers.finish_background",
        "the others wait until the chief has written in the background",
        f"{_ORBAX}.on_train_end(self, ...)",
        f"{_ORBAX}.wait_until_finished(self)",
    ),
    _core(
        "files.writers.load",
        "says why a file that was saved isn't there",
        "keras.src.models.model.Model.load_weights(self, filepath, ...)",
        "keras.src.saving.saving_lib.load_model(filepath, ...)",
        "keras.src.saving.saving_api.load_model(filepath, ...)",
        "keras.saving.load_model(filepath, ...)",
        "keras.models.load_model(filepath, ...)",
    ),
    # They may save in the midst of an epoch, on all ranks after the same batch.
    _core(
        "training.callbacks.flush_accumulators",
        "what saves in the midst of an epoch gets all workers' accumulated gradients",
        f"{_BACKUP}._save_model(self)",
        f"{_CALLBACKS}.model_checkpoint.ModelCheckpoint._save_model(self, ...)",
        f"{_ORBAX}._save_checkpoint(self, ...)",
    ),
    # The learning rate times a factor.
    _rate(
        "optimizer.learning_rate.on_base_rate",
        "sees the rate before it is multiplied by the factor of `ScaleLearningRate`",
        f"{_CALLBACKS}.learning_rate_scheduler.LearningRateScheduler.on_epoch_begin"
        "(self, epoch, logs)",
        f"{_CALLBACKS}.reduce_lr_on_plateau.ReduceLROnPlateau.on_epoch_end"
        "(self, epoch, logs)",
    ),
    _rate(
        "optimizer.learning_rate.set_rate",
        "sets what is read: the rate after it is multiplied",
        f"{_OPTIMIZER}.learning_rate=(self, learning_rate)",
    ),
)
