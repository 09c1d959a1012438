import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import report

from browser import need
from hosts import Hosts
from kerasdist.cluster import resolve
from pace import bound
from places import ROOT, TESTS
from workers import output_of, python_env

BIN = ROOT / ".venv-manifests" / "bin"
EXAMPLES = ROOT / "examples"
MANIFESTS = sorted(EXAMPLES.glob("*.yaml"))


FAULTS = [
    ("kubernetes", "parallelism", "paralelism", "'paralelism' was unexpected"),
    ("kubeflow_trainjob", "numNodes", "nodes", "spec.trainer.nodes is unknown"),
    ("kubeflow_tfjob", "secretKeyRef", "secretRef", "valueFrom.secretRef is unknown"),
    ("kubeflow_tfjob", "replicas: 2", "replicas: two", "replicas isn't a int"),
]


@pytest.fixture(scope="module")
def tools() -> Path:
    stamp = BIN.parent / ".created"
    reason = None if stamp.exists() else f"there is no {stamp.parent.name}"
    need(reason, "make manifests")
    return BIN


@pytest.fixture(scope="module")
def found(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The faults of all, by one process: it reads large schemas."""
    folder = tmp_path_factory.mktemp("faulty")
    paths = []
    for i, (name, old, new, _) in enumerate(FAULTS):
        text = (EXAMPLES / f"{name}.yaml").read_text()
        assert old in text
        paths.append(folder / f"fault-{i}.yaml")
        paths[-1].write_text(text.replace(old, new))
    script = TESTS / "engines" / "validate.py"
    return output_of(tools / "python", script, *MANIFESTS, *paths).splitlines()


@pytest.mark.soak
def test_manifests_fit_their_schemas(found: list[str]) -> None:
    assert len(MANIFESTS) == 3
    assert len(found) == len(FAULTS)
    for number, (*_, said) in enumerate(FAULTS):
        (line,) = (line for line in found if line.startswith(f"fault-{number}.yaml: "))
        assert said in line


@pytest.mark.soak
def test_the_dockerfile_is_linted(tools: Path) -> None:
    lint = [tools / "hadolint", EXAMPLES / "Dockerfile"]
    done = subprocess.run(
        lint, capture_output=True, text=True, timeout=bound(60), check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_dockerfile_copies_what_there_is() -> None:
    text = (EXAMPLES / "Dockerfile.dockerignore").read_text()
    for name in re.findall(r"^!(.*)$", text, re.M):
        assert (ROOT / name).exists(), name


def command_of_trainjob() -> list[str]:
    yaml = pytest.importorskip("yaml")
    (job,) = yaml.safe_load_all((EXAMPLES / "kubeflow_trainjob.yaml").read_text())
    trainer = job["spec"]["trainer"]
    return [*trainer["command"], *trainer["args"]]


def environment(node: int, master: str, **more: str) -> dict[str, str]:
    """What Kubeflow Trainer sets for a node, and the manifest."""
    pet = {"NNODES": "2", "NPROC_PER_NODE": "auto", "NODE_RANK": str(node)}
    pet |= {"MASTER_ADDR": master, "MASTER_PORT": "29400"}
    given = {f"PET_{name}": value for name, value in pet.items()}
    return python_env({**given, "WORKERS_PER_NODE": "1", **more})


def test_the_command_of_a_trainjob(tmp_path: Path) -> None:
    program = tmp_path / "kerasdist"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command_of_trainjob(),
        env=environment(1, "digits-node-0-0.digits", PATH=path),
        capture_output=True,
        text=True,
        timeout=bound(30),
        check=True,
    )
    assert done.stdout == (
        "run --nnodes 2 --node-rank 1 --rendezvous digits-node-0-0.digits:29400 "
        "-n 1 /app/digits.py\n"
    )


@pytest.mark.soak
@pytest.mark.netns
@pytest.mark.timeout(300)
def test_two_nodes_of_a_trainjob(two_hosts: Hosts) -> None:
    """Its command on two hosts, with the variables that the operator sets."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    secret = secrets.token_hex(32)
    *command, script = command_of_trainjob()
    assert script == "/app/digits.py"
    nodes = [
        subprocess.Popen(
            [*two_hosts.prefix(node), *command, str(EXAMPLES / "digits.py")],
            env=environment(
                node, two_hosts.address(0), PATH=path, KERASDIST_SECRET=secret
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (1, 0)
    ]
    outputs = [node.communicate(timeout=bound(240))[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "".join(outputs)
    assert "weights bit-equal on all workers: True" in outputs[1]


def test_the_settings_of_a_script_on_sagemaker(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "cloud.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    hosts = ["algo-1", "algo-2"]
    monkeypatch.setenv("SM_HOSTS", json.dumps(hosts))
    monkeypatch.setenv("TF_CONFIG", "")
    for rank, host in enumerate(hosts):
        monkeypatch.setenv("SM_CURRENT_HOST", host)
        exec(code, {})
        place = resolve(environ={"TF_CONFIG": os.environ["TF_CONFIG"]})
        assert (place.rank, place.size) == (rank, 2)
        assert place.address == f"{host}:12345"


def docker(*arguments: str) -> str:
    command, kept = ["docker", *arguments], subprocess.STDOUT
    options = {"cwd": ROOT, "timeout": bound(1500), "text": True}
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=kept, check=True, **options
    ).stdout


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_image_trains() -> None:
    if shutil.which("docker") is None:
        pytest.skip("Docker isn't installed")
    engine = ["docker", "info"]
    if subprocess.run(engine, capture_output=True, check=False).returncode:
        pytest.skip("no Docker engine answers")
    image = docker("build", "-q", "-f", "examples/Dockerfile", ".").strip()
    try:
        output = docker("run", "--rm", "--init", image)
    finally:
        docker("rmi", "-f", image)
    assert "weights bit-equal on all workers: True" in output


@pytest.mark.parametrize("name", report.ENGINES)
def test_each_engine_has_its_tests(name: str) -> None:
    for each in report.ENGINES[name].split():
        path, _, test = each.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {test}(" in text if test else "def test_" in text
