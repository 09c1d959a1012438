import os
import pty
import select
import shutil
import signal
import subprocess
import time

import pytest

from kerasdist import cli
from pace import bound

TYPED = {
    "doct\t": "doctor",
    "run --output \tal\t": "run --output all",
    "run -n 2 --log-d\tlo\t tr\t": "run -n 2 --log-dir logs train.py",
    "bench -n 2 train.py --outp\t": "bench -n 2 train.py --outp",
    "plan train.py:f --micro\t": "plan train.py:f --micro-batches",
    "completion fi\t": "completion fish",
}
# A command in the place of the real one, which shows its words.
SHOW = 'kerasdist() { echo "<$*>"; }'


def script_of(shell, folder, capsys):
    assert cli.main(["completion", shell]) == 0
    path = folder / f"complete.{shell}"
    path.write_text(capsys.readouterr().out)
    (folder / "train.py").touch()
    (folder / "logs").mkdir()
    return path


def need(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} isn't installed")


class Typist:
    def __init__(self, command, folder):
        self.output = ""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            own = {"HOME": str(folder), "TERM": "dumb", "PS1": "at> "}
            os.execvpe(command[0], command, {**os.environ, **own})

    def type(self, text):
        os.write(self.fd, text.encode())

    def read_until(self, text, within=60.0):
        end = time.monotonic() + within
        while text not in self.output:
            ready, _, _ = select.select([self.fd], [], [], end - time.monotonic())
            assert ready, f"There is no {text!r} in {self.output!r}"
            self.output += os.read(self.fd, 65536).decode(errors="replace")
        before, _, self.output = self.output.partition(text)
        return before

    def close(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.fd)


@pytest.mark.parametrize(
    "command", [["bash", "--norc", "--noprofile", "-i"], ["zsh", "-f", "-i"]]
)
def test_a_shell_completes_what_is_typed(command, tmp_path, capsys):
    shell = command[0]
    need(shell)
    path = script_of(shell, tmp_path, capsys)
    typist = Typist(command, tmp_path)
    try:
        typist.type(f"{SHOW}; source {path.name}; echo rea''dy\n")
        typist.read_until("ready\r")
        for keys, words in TYPED.items():
            typist.read_until("at> ")
            typist.type(f"kerasdist {keys}\n")
            typist.read_until("\n<")
            # zsh removes the slash when a space follows.
            found = typist.read_until(">").replace("/ ", " ").rstrip()
            assert found == words
    finally:
        typist.close()


def test_fish_completes(tmp_path, capsys):
    need("fish")
    path = script_of("fish", tmp_path, capsys)
    for line, expected in {
        "kerasdist run --outp": {"--output"},
        "kerasdist run -n 2 --output ": {"chief", "all"},
        "kerasdist run -n 2 tr": {"train.py"},
    }.items():
        done = subprocess.run(
            ["fish", "-c", f"source {path.name}; complete -C '{line}'"],
            cwd=tmp_path,
            env={**os.environ, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=bound(60),
            check=True,
        )
        assert done.stderr == ""
        found = {each.partition("\t")[0] for each in done.stdout.splitlines()}
        assert found == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_all_commands_and_options_are_known(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command in ("run", "doctor", "plan", "env", "completion"):
        assert command in script
        with pytest.raises(SystemExit, match=r"^0$"):
            cli.main([command, "--help"])
        _, _, text = capsys.readouterr().out.partition("options:")
        for line in text.splitlines():
            if line.startswith("  --"):
                name = line.split()[0].strip("-,")
                assert f"-l {name} " in script if shell == "fish" else name in script
