"""KERASDIST_TLS: what is wrong with it is said before anything is acquired."""

from __future__ import annotations

import datetime
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from certificates import Authority
from groups import addresses_of, join, nothing_stays_open
from kerasdist import errors
from kerasdist.transport.tls.credentials import Credentials, tls_fault

DOCS = Path(__file__).resolve().parents[3] / "docs" / "tls.md"
DAY = datetime.timedelta(days=1)


@pytest.fixture
def authority(tmp_path):
    return Authority(folder=tmp_path)


def fault_of(text):
    return tls_fault({"KERASDIST_TLS": text})


def test_certificates_that_fit_are_accepted(authority):
    assert fault_of(authority.issue()) is None
    assert tls_fault({}) is None
    assert Credentials.read({"KERASDIST_TLS": " "}) is None


@pytest.mark.parametrize("text", ["a", "a,b", "a,,c", "a,b,c,d", ",,"])
def test_three_paths_are_needed(text):
    assert fault_of(text).startswith(
        f"KERASDIST_TLS can't be used: it doesn't have three paths. Received: {text!r}."
    )


def test_all_missing_files_are_named(tmp_path):
    text = fault_of(f"{tmp_path}/a,{tmp_path},{tmp_path}/c")
    assert f"certificate '{tmp_path}/a' can't be read (No such file" in text
    assert f"key '{tmp_path}' can't be read (Is a directory)" in text
    assert f"CA '{tmp_path}/c' can't be read" in text


def of_another_key(authority):
    one, two = authority.issue("one").split(","), authority.issue("two").split(",")
    return f"{one[0]},{two[1]},{one[2]}"


def with_garbage(place):
    def make(authority):
        paths = authority.issue().split(",")
        Path(paths[place]).write_bytes(b"-----BEGIN\x00 nothing")
        return ",".join(paths)

    return make


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            of_another_key,
            "the key '.*two.key' doesn't belong to the certificate '.*one",
        ),
        (lambda ca: ca.issue(valid=-DAY), "the certificate '.*' has expired"),
        (lambda ca: ca.issue(begins=DAY / 2), "isn't valid yet"),
        (lambda ca: ca.issue(password=b"x"), "the key '.*' is encrypted with a passw"),
        (lambda ca: ca.server_only(), "isn't for this purpose: its extended key us"),
        (
            lambda ca: ca.issue(ca=Authority(folder=ca.folder, name="other").path),
            "isn't signed by the job's CA",
        ),
        (with_garbage(0), "the certificate '.*' isn't a certificate in PEM format"),
        (with_garbage(1), "the key '.*' isn't a private key in PEM format"),
        (with_garbage(2), "the CA '.*' isn't a certificate in PEM format"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_acquired(
    authority, monkeypatch, make, expected
):
    text = make(authority)
    monkeypatch.setenv("KERASDIST_TLS", text)
    with (
        nothing_stays_open(),
        pytest.raises(errors.ClusterError, match=expected) as caught,
    ):
        join(addresses_of(2), 0)
    assert str(caught.value).startswith("KERASDIST_TLS can't be used: the ")
    assert f"Received: {text!r}. Expected " in str(caught.value)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl isn't installed")
def test_the_commands_of_the_page_make_certificates_that_fit(tmp_path):
    blocks = re.findall(r"^```sh\n(.*?)^```", DOCS.read_text(), re.M | re.S)
    commands = "".join(block for block in blocks if "openssl" in block)
    subprocess.run(
        ["sh", "-e"],
        input=commands.encode(),
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=60,
    )
    paths = [tmp_path / name for name in ("task.pem", "task.key", "ca.pem")]
    assert fault_of(",".join(map(str, paths))) is None
    assert paths[1].stat().st_mode & 0o077 == 0
