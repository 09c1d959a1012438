import functools
import json
import os
import re
import shlex
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from soak import but_soak

from kerasdist import cli, errors
from kerasdist.cluster import resolve
from kerasdist.collectives.connect import TRANSPORTS
from places import ROOT
from workers import Workers, free_ports, output_of

README = (ROOT / "README.md").read_text(encoding="utf-8")
STRATEGIES, LAUNCHING, FAILURES = (
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("strategies", "launching", "failures")
)
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("bench*/**/*.md"),
    )
)
MANIFEST = ROOT / "examples" / "kubernetes.yaml"


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def indented(text: str) -> list[str]:
    return [line[4:] for line in text.splitlines() if line.startswith("    ")]


def anchor(heading: str) -> str:
    """The name of a heading in a link, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_links_lead_somewhere_and_every_page_is_linked():
    linked, broken = set(), []
    for name in DOCUMENTS:
        for link in re.findall(r"\]\(([^()\s]+)\)", read(name)):
            target, _, fragment = link.partition("#")
            if "://" in target:
                continue
            path = (ROOT / name).parent / target if target else ROOT / name
            linked.add(path.resolve())
            headings = []
            if fragment and path.exists():
                headings = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.M)
            if not path.exists() or fragment not in ["", *map(anchor, headings)]:
                broken.append((name, link))
    assert broken == []
    pages = {*(ROOT / "docs").glob("*.md"), *(ROOT / "examples").iterdir()}
    assert {page for page in pages if page.is_file()} - linked == set()


def test_python_compiles():
    for name in DOCUMENTS:
        for code in blocks(read(name), "python"):
            compile(code, name, "exec")


@functools.cache
def change() -> tuple[str, str]:
    (diff,) = blocks(README, "diff")
    assert blocks(read("docs/index.md"), "diff") == [diff]
    lines = [line or " " for line in diff.splitlines()]
    assert {line[0] for line in lines} == {" ", "+", "-"}
    before = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
    after = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
    return before, after


def trained(script: Path, size: int) -> list[str]:
    return [finished.output for finished in Workers(script, size, deadline=150).run()]


def test_the_change_to_a_script(tmp_path):
    """It trains before, and after with two workers to the same numbers."""
    outputs: list[str] = []
    for size, script in zip((1, 2), change(), strict=True):
        path = tmp_path / f"{size}.py"
        path.write_text(
            "import keras\nkeras.utils.set_random_seed(0)\n"
            + script.replace("epochs=5", "epochs=5, shuffle=False, verbose=0")
            + "print('\\nWEIGHTS', *model.get_weights()[0].reshape(-1).tolist())\n"
        )
        outputs += trained(path, size)
    plain, first, second = (
        [float(v) for v in re.search("WEIGHTS (.*)", text).group(1).split()]
        for text in outputs
    )
    assert first == second
    assert first == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize(
    "page",
    but_soak(
        ["migrate_parameter_server.md"],
        sorted(path.name for path in (ROOT / "docs").glob("migrate_*.md")),
    ),
)
def test_the_script_of_a_migration_trains_and_saves(page, tmp_path):
    """The one after the change; the one before needs the other system."""
    _, after = blocks(read(f"docs/{page}"), "python")
    script = f"import os\n\nos.chdir({str(tmp_path)!r})\n{after}"
    servers = 1 if "ParameterServerStrategy" in after else 0
    Workers(script, 2, servers=servers, deadline=150).run()
    assert zipfile.is_zipfile(tmp_path / "model.keras")


@pytest.mark.soak
def test_the_custom_loop_gives_the_same_on_all_workers():
    first, second = trained(ROOT / "examples" / "custom_loop.py", 2)
    losses = re.findall(r"rank \d of 2: loss (\S+)$", first + second, re.MULTILINE)
    assert len(losses) == 2
    assert losses[0] == losses[1]
    assert float(losses[0]) < 0.01


def commands() -> list[list[str]]:
    found = []
    for name in DOCUMENTS:
        text = read(name)
        typed = "".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
        places = [*indented(text), *typed, *re.findall(r"`([^`\n]+)`", text)]
        for place in places:
            words = shlex.split(place, comments=True) if "kerasdist " in place else []
            while words and words[0] in ("srun", "python", "-m"):
                words.pop(0)
            if words[:1] == ["kerasdist"]:
                found.append(words[1:])
    return found


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main([command, "--help"])
    text = capsys.readouterr().out.partition("options:")[2]
    return set(re.findall(r"^  (?:-h, )?(--?[\w-]+)", text, re.MULTILINE))


def test_options_of_commands_exist(capsys):
    names = ("run", "bench", "predict", "advise", "doctor", "plan", "env", "completion")
    options = {name: help_of(name, capsys) for name in names}
    assert {words[0] for words in commands()} >= {"run", "doctor"}
    for command, *words in commands():
        for word in words:
            if word == "-m" or word.endswith(".py"):
                break  # what follows belongs to the script
            assert not word.startswith("-") or word in options[command]


def test_the_table_of_options_has_all_of_them(capsys):
    # Those of `bench` alone are in a table of another page.
    diagnosing = (ROOT / "docs" / "diagnosing.md").read_text(encoding="utf-8")
    _, *texts = (LAUNCHING + diagnosing).split("| option | |")
    rows = "\n".join(text.partition("\n\n")[0] for text in texts)
    named = set(re.findall(r"^\| `(--?[\w-]+)", rows, re.MULTILINE))
    assert named == (help_of("run", capsys) | help_of("bench", capsys)) - {"--help"}


def test_transports_and_exceptions_are_those_that_exist():
    (row,) = re.findall(r"^\| `transport=` \|.*$", STRATEGIES, re.MULTILINE)
    assert set(re.findall(r'`"(\w+)"`', row)) == set(TRANSPORTS)
    table = FAILURES.partition("| exception |")[2].partition("\n\n")[0]
    named = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert {"ClusterError", "WorkerLost"} <= named <= set(errors.__all__)


def test_every_target_is_explained():
    phony = re.findall(r"^\.PHONY: (.*)$", read("Makefile"), re.MULTILINE)
    explained = re.findall(r"(?:`(?:make )?|make )([\w-]+)", read("CONTRIBUTING.md"))
    # One for each folder of benchmarks/.
    assert {*" ".join(phony).split()} - {*explained} == {"$(BENCHMARKS)"}


def test_the_api_page_has_the_public_names():
    """`::: name` and its members, and `public_api.txt`."""
    names, text = [], read("tests/package/public_api.txt").partition("\n\n")[0]
    for line in text.splitlines()[2:]:
        match = re.match(r"(?:class )?( *)([\w.]+)", line)
        assert match is not None
        names.append(f"{names[-1].split(':')[0]}:{match[2]}" if match[1] else match[2])
    modules = {"kerasdist.__version__", "kerasdist.errors", "kerasdist.layers"}
    twice = {"kerasdist.KerasDistError", "kerasdist.WorkerLost"}
    found = []
    page = re.sub(r"\n +options:\n +members: \[(.*)\]", r" \1", read("docs/api.md"))
    for name, members in re.findall(r"^::: ([\w.]+)(.*)$", page, re.MULTILINE):
        found += [name, *(f"{name}:{each}" for each in re.findall(r"\w+", members))]
    assert sorted(found) == sorted(set(names) - modules - twice)


def test_the_glossary_has_the_words_of_contributing():
    text = read("CONTRIBUTING.md").partition("\n## Words\n")[2].partition("\n## ")[0]
    words = set(re.findall(r"\*(\w[\w ]*)\*", text))
    assert "rank" in words
    assert words <= set(re.findall(r"^\| ([^|]+) \|", read("docs/glossary.md"), re.M))


def message(kind: str) -> str:
    pages = README + FAILURES
    found = set(re.findall(rf"^kerasdist\.errors\.{kind}: (.*)$", pages, re.MULTILINE))
    (text,) = found
    return str(text)


def test_the_message_of_a_lost_worker():
    shown = message("WorkerLost")
    pattern = r"Rank (\d) \((\S+)\) was lost at step (\d+): (.*?)\. The"
    rank, host, step, reason = re.match(pattern, shown).groups()
    assert shown == str(errors.WorkerLost(int(rank), host, int(step), reason))


def settings(number: int = 0) -> str:
    """README's TF_CONFIG, of workers; 1: that of strategies.md, with servers."""
    page = (README, STRATEGIES)[number]
    (found,) = re.findall(r"^export TF_CONFIG='(.*?)'$", page, re.M | re.S)
    return str(found)


def test_tf_config_is_accepted():
    places = []
    for index in (0, 1):
        text = settings().replace('"index": 0', f'"index": {index}')
        place = resolve(environ={"TF_CONFIG": text})
        places.append((place.rank, place.size, place.address))
    assert places == [(0, 2, "10.0.0.1:12345"), (1, 2, "10.0.0.2:12345")]
    server = resolve(environ={"TF_CONFIG": settings(1)})
    assert (server.rank, server.address) == (None, "10.0.0.3:12345")


def test_the_message_of_wrong_settings():
    text = settings().replace('"index": 0', '"index": 2')
    with pytest.raises(errors.ClusterError) as caught:
        resolve(environ={"TF_CONFIG": text})
    assert str(caught.value).splitlines()[0] == message("ClusterError")


def pod_lines() -> str:
    (text,) = re.findall(r"^ *- \|\n(.*?)^ *- sh", MANIFEST.read_text(), re.M | re.S)
    return textwrap.dedent(text)


def test_kubernetes_tf_config_is_accepted_for_every_index():
    workers = 12
    names = [f"digits-{index}.digits:12345" for index in range(workers)]
    for index in range(workers):
        printed = output_of(
            *("/bin/sh", "-c", pod_lines(), "sh", "printenv", "TF_CONFIG"),
            WORKERS=str(workers),
            JOB_NAME="digits",
            SERVICE="digits",
            PORT="12345",
            JOB_COMPLETION_INDEX=str(index),
        )
        place = resolve(environ={"TF_CONFIG": printed})
        assert (place.rank, place.size) == (index, workers)
        assert json.loads(printed)["cluster"] == {"worker": names}


def test_kubernetes_names_fit_together():
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(env["WORKERS"])
    assert env["JOB_NAME"] == name
    assert env["SERVICE"] == pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    (port,), (opened,) = service["spec"]["ports"], container["ports"]
    assert int(env["PORT"]) == port["port"] == opened["containerPort"]
    assert container["command"] == ["/bin/sh", "-c", pod_lines(), "sh"]
    assert "KERASDIST_SECRET" in env


def test_slurm_environment_resolves_as_the_table_says():
    text = read("docs/slurm.md")
    (block,) = blocks(text, "env")
    common = dict(line.split("=", 1) for line in block.splitlines())
    rows = re.findall(r"^\| (\d) \| (\d) \| (\d) \| (\d).* \| `(.*)` \|$", text, re.M)
    assert len(rows) == int(common["SLURM_STEP_NUM_TASKS"])
    for task, node, local, rank, address in rows:
        own = {"SLURM_PROCID": task, "SLURM_NODEID": node, "SLURM_LOCALID": local}
        place = resolve(environ={**common, **own})
        found = (place.source, str(place.rank), place.address)
        assert found == ("Slurm", rank, address)
        assert place.workers == tuple(row[4] for row in rows)


def test_slurm_script_hands_a_secret_and_its_arguments_to_srun(tmp_path):
    """With an `srun` that prints what it is given: Slurm isn't everywhere."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$KERASDIST_SECRET,$TF_CONFIG,$@"\n')
    srun.chmod(0o755)
    first, second = (
        output_of(
            *("bash", ROOT / "examples/slurm.sbatch", "train.py", "--epochs", "5"),
            PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            SLURM_CPUS_PER_TASK="4",
            TF_CONFIG="left over",
        )
        for _ in range(2)
    )
    pattern = r"([0-9a-f]{64}),,(--(kill-on-bad-exit|cpus-per-task)=\S+ )+python train"
    assert re.match(pattern, first)[1] != re.match(pattern, second)[1]
    assert first.endswith(" python train.py --epochs 5\n")


def test_every_environment_variable_is_explained():
    used = set()
    for folder in ("kerasdist", "callbacks"):
        for path in (ROOT / folder).rglob("*.py"):
            used |= set(re.findall(r"KERASDIST_[A-Z_]+[A-Z]", path.read_text("utf-8")))
    page = set(re.findall(r"^\| `(KERASDIST_\w+)` ", read("docs/settings.md"), re.M))
    assert page == used


@pytest.mark.soak
@pytest.mark.netns
def test_two_hosts_of_this_machine():
    (port,) = free_ports(1)
    script = ("bash", ROOT / "examples/two_hosts.sh")
    output = output_of(*script, PYTHON=sys.executable, PORT=str(port))
    first, second = re.findall(r"rank \d of 2: weights (\w+)", output)
    assert first == second
    assert "weights bit-equal on all workers: True" in output


def test_the_questions_of_contributing_are_answered_by_files_that_exist():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = page.split("## Where is what?")[1].split("\n## ")[0]
    paths = re.findall(r"`((?:kerasdist|callbacks)/[\w/.]+)`", table)
    assert len(paths) >= 8
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    for path, names in re.findall(r"`([\w/]+\.py)`: (`.*?`) \|", table):
        for name in re.findall(r"`(\w+)`", names):
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


def test_the_pages_stay_short():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    words = {
        page.name: len(re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL).split())
        for page in pages
        if (text := page.read_text(encoding="utf-8"))
    }
    assert sum(words.values()) <= 36_000, words
