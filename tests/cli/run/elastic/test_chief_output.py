"""The output of one worker, by its role: what is shown, and from where."""

from __future__ import annotations

from kerasdist.cli.run.output import RoleLines


def fed(lines, *pieces):
    return b"".join(lines.feed(piece, 0.0) for piece in pieces)


def test_a_new_chief_shows_what_it_wrote_since_the_old_one_ended():
    lines = RoleLines(None, is_chief=False)
    assert fed(lines, b"before\nat the ", b"same time") == b""
    assert lines.keep_all() == b""
    assert fed(lines, b" as it ended\nafter", b"wards\nno ") == b""
    assert lines.begin() == b"at the same time as it ended\nafterwards\n"
    assert lines.begin() == b""
    assert fed(lines, b"end\n") == b"no end\n"
    assert lines.flush() == b""


def test_the_old_chiefs_line_is_ended():
    lines = RoleLines(None, is_chief=True)
    assert fed(lines, b"\r1/10\r", b"2/10") == b"\r1/10\r"
    assert lines.end() == b"2/10\n"
    assert fed(lines, b"more\n") == b""
    assert lines.flush() == lines.end() == b""
    whole = RoleLines(b"[0] ", is_chief=True)
    assert fed(whole, b"all\n") == b"all\n"
    assert whole.end() == b""
    assert fed(whole, b"more\n") == b"[0] more\n"


def test_what_is_kept_has_a_bound():
    lines = RoleLines(None, is_chief=False)
    lines.keep_all()
    fed(lines, *[b"x" * 1000 + b"\n"] * 1000)
    assert len(lines.begin()) <= 64 * 1024
