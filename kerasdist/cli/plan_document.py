"""A plan as a JSON document: the keys of `kerasdist plan --json`."""

from __future__ import annotations

from typing import Any

from kerasdist.errors import PlanError
from kerasdist.placement.plan import Plan


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
