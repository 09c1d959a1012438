"""The command `kerasdist completion`: prints a shell's script."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence

# The words that can follow `kerasdist` on the command line, as parsers know them.

# Their script isn't an argument that the parser knows.
_WITH_SCRIPT = ("run",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a command.

    Attributes:
        names: All its names.
        help: Its description.
        has_value: Whether a word follows it.
        choices: The words that may follow; empty: any.
    """

    names: tuple[str, ...]
    help: str
    has_value: bool
    choices: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A command of `kerasdist`.

    Attributes:
        name: Its name.
        help: Its description.
        options: Its options.
        words: The words that may stand without an option; empty: none, or any.
        has_script: Whether a script's name may follow.
        ends: Whether what follows the script belongs to it.
    """

    name: str
    help: str
    options: tuple[Option, ...]
    words: tuple[str, ...]
    has_script: bool
    ends: bool


def read_commands(
    parsers: Mapping[str, argparse.ArgumentParser], helps: Mapping[str, str]
) -> list[Command]:
    """Return the commands.

    Args:
        parsers: The parser of each command.
        helps: The description of each command.
    """
    return [
        _read_command(name, parser, helps.get(name, ""))
        for name, parser in parsers.items()
    ]


def _read_command(name: str, parser: argparse.ArgumentParser, text: str) -> Command:
    options: list[Option] = []
    words: list[str] = []
    has_script = name in _WITH_SCRIPT
    # argparse has no public list of them; other tools read this one, too.
    for action in parser._actions:
        choices = tuple(map(str, action.choices or ()))
        if action.option_strings:
            options.append(
                Option(
                    names=tuple(action.option_strings),
                    help=(action.help or "").replace("%%", "%"),
                    has_value=action.nargs != 0,
                    choices=choices,
                )
            )
        else:
            words += choices
            has_script = has_script or not choices
    return Command(
        name=name,
        help=text,
        options=tuple(options),
        words=tuple(words),
        has_script=has_script,
        ends=name in _WITH_SCRIPT,
    )


# The scripts by which bash, zsh and fish complete `kerasdist`'s words.

SHELLS = ("bash", "zsh", "fish")
# Also run by zsh, as bash would. Without a reply the shell completes names of files.
_BASH = """\
_kerasdist() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}"
    local previous="${{COMP_WORDS[COMP_CWORD-1]}}"
    local options="" valued="" words="" other="" files="" script="" skip="" i
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$current"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    *) return ;;
    esac
    # What follows the script belongs to it.
    for ((i = 2; i < COMP_CWORD; i++)); do
        if [ -n "$skip" ]; then
            skip=""
            continue
        fi
        case "${{COMP_WORDS[i]}}" in
        -m | --) script=yes ;;
        -*) case " $valued " in *" ${{COMP_WORDS[i]}} "*) skip=yes ;; esac ;;
        *) script=yes ;;
        esac
    done
    if [ -n "$script" ] && [ "$files" = after ]; then
        return
    fi
    if [ -n "$skip" ]; then
        if [ -n "$words" ]; then
            COMPREPLY=($(compgen -W "$words" -- "$current"))
        fi
        return
    fi
    case "$current" in
    -*) COMPREPLY=($(compgen -W "$options" -- "$current")) ;;
    *) [ -n "$files" ] || COMPREPLY=($(compgen -W "$other" -- "$current")) ;;
    esac
}}
complete -o default -F _kerasdist kerasdist
"""
_ZSH = """\
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}
autoload -Uz bashcompinit && bashcompinit
{bash}"""


def script_for(shell: str, commands: Sequence[Command]) -> str:
    """Return the script for one of `SHELLS`.

    Args:
        shell: The shell.
        commands: The commands of `kerasdist`.
    """
    if shell == "fish":
        return _fish(commands)
    bash = _BASH.format(
        commands=" ".join([*(each.name for each in commands), "--help", "--version"]),
        cases="\n".join(map(_bash_case, commands)),
    )
    return bash if shell == "bash" else _ZSH.format(bash=bash)


def _bash_case(command: Command) -> str:
    names = [name for option in command.options for name in option.names]
    valued = [
        name for option in command.options if option.has_value for name in option.names
    ]
    other = " ".join(command.words or names)
    files = "after" if command.ends else "yes" if command.has_script else ""
    choices = "\n".join(
        f'        {" | ".join(option.names)}) words="{" ".join(option.choices)}" ;;'
        for option in command.options
        if option.choices
    )
    if choices:
        choices = f'        case "$previous" in\n{choices}\n        esac\n'
    return (
        f"    {command.name})\n"
        f'        options="{" ".join(names)}"\n'
        f'        valued="{" ".join(valued)}"\n'
        f'        other="{other}"\n'
        f'        files="{files}"\n'
        f"{choices}        ;;"
    )


def _fish(commands: Sequence[Command]) -> str:
    lines = ["complete -c kerasdist -f"]
    first = "complete -c kerasdist -n __fish_use_subcommand"
    lines += [f"{first} -l help", f"{first} -l version"]
    for command in commands:
        lines.append(f"{first} -a {command.name} -d {_quoted(command.help)}")
        inside = f"__fish_seen_subcommand_from {command.name}"
        begin = f"complete -c kerasdist -n '{inside}'"
        if command.has_script:
            lines.append(f"{begin} -F")
        if command.words:
            lines.append(f"{begin} -x -a {_quoted(' '.join(command.words))}")
        lines += [_fish_option(begin, option) for option in command.options]
    return "\n".join(lines) + "\n"


def _fish_option(begin: str, option: Option) -> str:
    words = [begin]
    for name in option.names:
        bare = name.lstrip("-")
        if name.startswith("--"):
            words.append(f"-l {bare}")
        else:
            words.append(f"-s {bare}" if len(bare) == 1 else f"-o {bare}")
    if option.choices:
        words.append(f"-x -a {_quoted(' '.join(option.choices))}")
    elif option.has_value:
        words.append("-r -F")
    return " ".join([*words, "-d", _quoted(option.help)])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


_EPILOG = """\
examples:
  source <(kerasdist completion bash)         in ~/.bashrc
  source <(kerasdist completion zsh)          in ~/.zshrc
  kerasdist completion fish | source          in ~/.config/fish/config.fish"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `completion` to the command line, after all others."""
    parser = commands.add_parser(
        "completion",
        help="print a script by which a shell completes kerasdist's words",
        description="Print a script by which bash, zsh or fish completes commands, "
        "options and their values.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(
        parser=parser, handler=lambda arguments: _run(arguments, commands)
    )


def _run(
    arguments: argparse.Namespace,
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> int:
    # What `add_parser` of each command was given as `help`.
    helps = {each.dest: each.help or "" for each in commands._choices_actions}
    found = read_commands(commands.choices, helps)
    print(script_for(arguments.shell, found), end="")
    return 0
