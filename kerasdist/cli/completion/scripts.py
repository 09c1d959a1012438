"""The scripts by which bash, zsh and fish complete `kerasdist`'s words."""

from __future__ import annotations

from collections.abc import Sequence

from kerasdist.cli.completion.grammar import Command, Option

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
