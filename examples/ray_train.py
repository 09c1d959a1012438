"""Two workers of Ray Train, which continue after a lost one; see docs/ray.md.

    python examples/ray_train.py
    python examples/ray_train.py --workers 4 --storage /mnt/shared/ray

Ray starts the workers and sets TF_CONFIG. When one is lost, Ray starts all of them
again, and `fit` continues after the last finished epoch.
"""

import argparse
import os
import secrets
import tempfile

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer


def train(config):
    """The training script. Every worker runs it."""
    import keras
    from sklearn.datasets import load_digits

    import kerasdist

    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype("float32")
    keras.utils.set_random_seed(0)
    strategy = kerasdist.RingStrategy()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.Adam(2e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    model.fit(
        x,
        y,
        batch_size=64,  # of all workers
        epochs=config["epochs"],
        verbose=0,
        callbacks=[
            # All workers need this folder.
            keras.callbacks.BackupAndRestore(config["backup"]),
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: ray.train.report(
                    {"epoch": epoch, **logs}
                )
            ),
        ],
    )

    loss, accuracy = model.evaluate(x, y, batch_size=64, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        model.save(os.path.join(folder, "digits.keras"))
        ray.train.report(
            {"loss": loss, "accuracy": accuracy, "workers": strategy.size},
            checkpoint=ray.train.Checkpoint.from_directory(folder)
            if strategy.is_chief
            else None,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--gpu", action="store_true", help="one for each worker")
    parser.add_argument(
        "--storage",
        default=os.path.expanduser("~/ray_results"),
        help="a folder that all hosts see",
    )
    options = parser.parse_args()

    # A new secret for this job. As a part of the function it is in no configuration
    # that Ray's dashboard or logs show.
    secret = secrets.token_hex(32)

    def train_with_secret(config):
        os.environ["KERASDIST_SECRET"] = secret
        train(config)

    name = f"digits-{secrets.token_hex(4)}"
    trainer = TensorflowTrainer(
        train_with_secret,
        train_loop_config={
            "epochs": options.epochs,
            "backup": os.path.join(options.storage, name, "backup"),
        },
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(
            name=name,
            storage_path=options.storage,
            # How many times the workers are started again.
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    result = trainer.fit()
    print(
        f"{result.metrics['workers']} workers: loss {result.metrics['loss']:.6f}, "
        f"accuracy {result.metrics['accuracy']:.4f}"
    )
    print(f"the model is in {result.checkpoint.path}")


if __name__ == "__main__":
    main()
