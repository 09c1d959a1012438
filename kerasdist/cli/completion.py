"""The command `kerasdist completion`: prints a shell's script.

The script has the words that can follow `kerasdist`, as the parsers know them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kerasdist.cli.console import WITH_SCRIPT, Command, names_of, options_of

SHELLS = ("bash", "zsh", "fish")
# Also run by zsh, as bash would. Without a reply the shell completes names of files.
_BASH = """\
_kerasdist() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
    local options="" valued="" words="" other="" ends="" script="" skip="" i
    COMPREPLY=()
    case "${{COMP_WORDS[1]}}" in
{cases}
    *) [ "$COMP_CWORD" -eq 1 ] || return ;;
    esac
    for ((i = 2; i < COMP_CWORD; i++)); do
        case "$skip ${{COMP_WORDS[i]}}" in
        yes*) skip="" ;;
        " -m" | " --" | " " | " "[!-]*) script=yes ;;
        *) case " $valued " in *" ${{COMP_WORDS[i]}} "*) skip=yes ;; esac ;;
        esac
    done
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    elif [ "$script$ends" = yesyes ]; then
        return  # what follows the script belongs to it
    elif [ -z "$skip" ]; then
        case "$current" in
        -*) words="$options" ;;
        *) words="$other" ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _kerasdist kerasdist
"""
_ZSH = """\
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}
autoload -Uz bashcompinit && bashcompinit
{bash}"""
_FISH_FIRST = "complete -c kerasdist -n __fish_use_subcommand"


class _Command:
    """The words of a command of `kerasdist`.

    Args:
        name: Its name.
        help: Its description.
        parser: Knows its options, and the words that may stand without one.
    """

    def __init__(self, name: str, help: str, parser: argparse.ArgumentParser) -> None:
        self.name, self.help = name, help
        # argparse has no public list of them; other tools read this one, too.
        self.options = [each for each in parser._actions if each.option_strings]
        others = [each for each in parser._actions if not each.option_strings]
        self.words = " ".join(map(_choices, others)).strip()
        self.has_script = name in WITH_SCRIPT or any(not o.choices for o in others)

    def bash_case(self) -> str:
        """Return the lines of bash that are run for this command."""
        names = " ".join(names_of(self.options))
        valued = " ".join(names_of(self.options, with_value=True))
        other = "" if self.has_script else self.words or names
        choices = "".join(
            f'        {" | ".join(each.option_strings)}) words="{_choices(each)}" ;;\n'
            for each in self.options
            if each.choices
        )
        if choices:
            choices = f'        case "$previous" in\n{choices}        esac\n'
        return (
            f"    {self.name})\n"
            f'        options="{names}"\n'
            f'        valued="{valued}"\n'
            f'        other="{other}"\n'
            f'        ends="{"yes" if self.name in WITH_SCRIPT else ""}"\n'
            f"{choices}        ;;"
        )

    def fish_lines(self) -> list[str]:
        """Return the lines of fish that complete this command's words."""
        begin = f"complete -c kerasdist -n '__fish_seen_subcommand_from {self.name}'"
        lines = [f"{_FISH_FIRST} -a {self.name} -d {_quoted(self.help)}"]
        if self.has_script:
            lines.append(f"{begin} -F")
        if self.words:
            lines.append(f"{begin} -x -a {_quoted(self.words)}")
        return lines + [f"{begin} {_fish_option(each)}" for each in self.options]


def _choices(action: argparse.Action) -> str:
    return " ".join(map(str, action.choices or ()))


def _fish_option(option: argparse.Action) -> str:
    words = []
    for name in option.option_strings:
        bare = name.lstrip("-")
        kind = "l" if name.startswith("--") else "s" if len(bare) == 1 else "o"
        words.append(f"-{kind} {bare}")
    if option.choices:
        words.append(f"-x -a {_quoted(_choices(option))}")
    elif option.nargs != 0:
        words.append("-r -F")
    return " ".join([*words, "-d", _quoted((option.help or "").replace("%%", "%"))])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _script_for(shell: str, commands: Sequence[_Command]) -> str:
    """Return the script for one of `SHELLS`."""
    if shell == "fish":
        lines = [f"{_FISH_FIRST} -l help", f"{_FISH_FIRST} -l version"]
        lines += [line for each in commands for line in each.fish_lines()]
        return "\n".join(["complete -c kerasdist -f", *lines, ""])
    bash = _BASH.format(
        commands=" ".join([*(each.name for each in commands), "--help", "--version"]),
        cases="\n".join(each.bash_case() for each in commands),
    )
    return bash if shell == "bash" else _ZSH.format(bash=bash)


_EPILOG = """\
examples:
  source <(kerasdist completion bash)         in ~/.bashrc
  source <(kerasdist completion zsh)          in ~/.zshrc
  kerasdist completion fish | source          in ~/.config/fish/config.fish"""


def _complete(arguments: argparse.Namespace) -> int:
    commands = arguments.commands
    # What each command has as `help`; argparse has no public list of them.
    helps = {each.dest: each.help or "" for each in commands._choices_actions}
    known = commands.choices.items()
    found = [_Command(name, helps[name], each) for name, each in known]
    print(_script_for(arguments.shell, found), end="")
    return 0


COMMAND = Command(
    name="completion",
    handler=_complete,
    options=options_of("shell", shell={"choices": SHELLS}),
    help="print a script by which a shell completes kerasdist's words",
    description="Print a script by which bash, zsh or fish completes commands, options "
    "and their values.",
    epilog=_EPILOG,
)
