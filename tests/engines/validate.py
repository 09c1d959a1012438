"""Manifests against the schemas of what reads them, by an interpreter that has these.

    .venv-manifests/bin/python tests/engines/validate.py examples/kubernetes.yaml ...

Prints one line for each fault. Kubernetes's own kinds are validated against its JSON
schemas, those of Kubeflow against the models of its Python packages.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubeflow.training.models
import kubernetes.client.models
import kubernetes_validate
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob


def faults(manifest: dict[str, Any]) -> Iterator[str]:
    kind = manifest.get("apiVersion"), manifest.get("kind")
    if kind == ("trainer.kubeflow.org/v1alpha1", "TrainJob"):
        try:
            read = TrainerV1alpha1TrainJob.from_dict(manifest)
        except ValueError as error:
            yield f"TrainJob: {' '.join(str(error).split())}"
        else:
            # Unknown fields are dropped.
            yield from _lost(manifest, read.to_dict(), "TrainJob")
    elif kind == ("kubeflow.org/v1", "TFJob"):
        yield from _openapi_faults("KubeflowOrgV1TFJob", manifest, "TFJob")
    else:
        try:
            version = kubernetes_validate.latest_version()
            kubernetes_validate.validate(manifest, version, strict=True)
        except Exception as error:
            # The rest is the whole schema.
            yield f"{manifest.get('kind')}: {str(error).splitlines()[0]}"


def _lost(given: Any, kept: Any, where: str) -> Iterator[str]:
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            if key in kept:
                yield from _lost(value, kept[key], f"{where}.{key}")
            else:
                yield f"{where}.{key} is unknown"
    elif isinstance(given, list) and isinstance(kept, list):
        for i, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from _lost(one, other, f"{where}[{i}]")
    elif given != kept:
        yield f"{where}: {given!r} is read as {kept!r}"


_PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float)}


def _openapi_faults(kind: str, value: Any, where: str) -> Iterator[str]:
    """Walk through generated models, which themselves ignore unknown fields."""
    if match := re.fullmatch(r"(?:dict\(str, |list\[)(.*)[)\]]", kind):
        if not isinstance(value, dict if kind.startswith("dict") else list):
            yield f"{where} isn't a {kind}"
            return
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _openapi_faults(match[1], item, f"{where}[{key!r}]")
    elif kind in _PLAIN:
        if not isinstance(value, _PLAIN[kind]) or isinstance(value, bool) != (
            kind == "bool"
        ):
            yield f"{where} isn't a {kind}: {value!r}"
    elif kind not in ("object", "datetime"):
        name = kind.removesuffix("Schema")
        model = getattr(kubeflow.training.models, name, None) or getattr(
            kubernetes.client.models, name
        )
        if not isinstance(value, dict):
            yield f"{where} isn't a {kind}: {value!r}"
            return
        names = {name: key for key, name in model.attribute_map.items()}
        for key, item in value.items():
            if key not in names:
                yield f"{where}.{key} is unknown"
            else:
                yield from _openapi_faults(
                    model.openapi_types[names[key]], item, f"{where}.{key}"
                )


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            for fault in faults(manifest):
                print(f"{path.name}: {fault}")
