"""Secrets in text: what is taken for one, what is not, and masking a stream however it is cut."""

from __future__ import annotations

import base64
import re
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes.guards.secrets import MARK, Secrets, redact_tree
from support.cutting import all_cuts, any_cut, cuts

NOTHING_KNOWN = Secrets()
# A tail of a delta that long may be the beginning of a secret and is held back.
HELD_CHARS_MIN = 6
LETTERS = "aB3dE5fG7hJ9kL1mN2pQ4rS6tU8vW0xY"

# Put together here so that no scanner takes this file for a leak.
KEYS = {
    "openai": "sk-" + LETTERS,
    "openai project": "sk-" + "proj-" + LETTERS + "_" + LETTERS,
    "anthropic": "sk-" + "ant-api03-" + LETTERS + "-" + LETTERS,
    "openrouter": "sk-" + "or-v1-" + "0123456789abcdef" * 4,
    "stripe": "sk_" + "live_" + LETTERS,
    "stripe restricted": "rk_" + "test_" + LETTERS,
    "github": "ghp_" + LETTERS + "abcd",
    "github server": "ghs_" + LETTERS + "abcd",
    "github fine-grained": "github_" + "pat_" + LETTERS + "_" + LETTERS,
    "gitlab": "glpat-" + LETTERS[:20],
    "slack bot": "xoxb-" + "123456789012-1234567890123-" + LETTERS[:24],
    "slack app": "xapp-" + "1-A0123456789-1234567890123-" + LETTERS,
    "huggingface": "hf_" + LETTERS + "ab",
    "groq": "gsk_" + LETTERS + LETTERS[:20],
    "tavily": "tvly-" + LETTERS,
    "replicate": "r8_" + LETTERS + "abcde",
    "npm": "npm_" + LETTERS + "abcd",
    "pypi": "pypi-" + "AgEIcHlwaS5vcmc" + LETTERS * 2,
    "google": "AIza" + "Sy" + LETTERS + "a",
    "aws id": "AKIA" + "IOSFODNN7EXAMPLE",
    "aws session id": "ASIA" + "IOSFODNN7EXAMPLE",
    "xai": "xai-" + LETTERS * 2,
    "nvidia": "nvapi-" + LETTERS * 2,
    "cerebras": "csk-" + LETTERS.lower(),
    "fireworks": "fw_" + LETTERS[:24],
    "perplexity": "pplx-" + LETTERS + LETTERS[:16],
    "sendgrid": "SG." + LETTERS[:22] + "." + LETTERS + LETTERS[:11],
    "stripe webhook": "whsec_" + LETTERS,
    "google oauth": "ya29." + LETTERS * 2,
    "jwt": "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0In0." + LETTERS + "_-" + LETTERS[:9],
}


FRAMES = ["{}", "key is {}.", "({})", '"{}"', "a\n{}\nb", "x={}", "https://h.test/?k={}&b=1"]


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_vendor_keys_are_redacted_by_shape(key: str) -> None:
    assert [NOTHING_KNOWN.redact(frame.format(key)) for frame in FRAMES] == [frame.format(MARK) for frame in FRAMES]


NAMED = [
    ("API_KEY={}", "abc123def456"),
    ("export OPENAI_API_KEY={}", "abc123def456"),
    ('GITHUB_TOKEN="{}"', "abc123def456"),
    ("DB_PASSWORD={}", "hunter2hunter2"),
    ("PGPASSWORD={} psql", "hunter2hunter2"),
    ("password: {}", "hunter2hunter2"),
    ("client_secret={}&x=1", "abc123def456"),
    ("https://h.test/cb?access_token={}&state=1", "abc123def456"),
    ("AWS_SECRET_ACCESS_KEY={}", "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"),
    ("aws_secret_access_key = {}", "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"),
    ("SECRET_KEY={}", "django-insecure-abc123def456"),
    ('{{"api_key": "{}"}}', "abc123def456"),
    ('{{"apiKey":"{}","x":1}}', "abc123def456"),
    ('{{"clientSecret": "{}"}}', "abc123def456"),
    ("{{'password': '{}'}}", "hunter2hunter2"),
    ('{{\\"api_key\\": \\"{}\\"}}', "abc123def456"),
    ('PASSWORD="{}"', "correct horse battery staple"),
    ('{{"password": "{}"}}', "abc,def;ghi&jkl}mno"),
    ("Authorization: Bearer {}", "abc123def456"),
    ("authorization: bearer {}", "abc.def-123_456"),
    ("Authorization: Basic {}", "dXNlcjpwYXNzd29yZA=="),
    ("Authorization: Token {}", "0123456789abcdef"),
    ("Authorization: {}", "0123456789abcdef0123"),
    ("x-api-key: {}", "abc123def456"),
    ("-H 'x-goog-api-key: {}'", "abc123def456"),
    ("postgres://app:{}@db.test:5432/x", "hunter2"),
    ("redis://:{}@cache.test", "hunter2"),
    ("https://user:{}@git.test/r.git", "hunter2"),
    ("postgres://app:{}@db.test/x", "p@ss@word"),
    ("Server=db;User Id=sa;Password={};", "hunter2hunter2"),
    ("Server=db;Uid=sa;Pwd={};", "hunter2hunter2"),
    ("DefaultEndpointsProtocol=https;AccountName=x;AccountKey={};", "abc123def456abc123def456=="),
]


@pytest.mark.parametrize(("frame", "value"), NAMED, ids=[frame[:40] for frame, _ in NAMED])
def test_value_after_credential_name_is_redacted(frame: str, value: str) -> None:
    assert NOTHING_KNOWN.redact(frame.format(value)) == frame.format(MARK)


@pytest.mark.parametrize("kind", ["", "RSA ", "EC ", "OPENSSH ", "ENCRYPTED "])
@pytest.mark.parametrize("closed", [True, False])
def test_private_key_block_is_redacted(kind: str, closed: bool) -> None:
    begin, end = f"-----BEGIN {kind}PRIVATE " + "KEY-----", f"-----END {kind}PRIVATE " + "KEY-----"
    block = f"{begin}\n{LETTERS}\n{LETTERS}\n" + (end if closed else "")
    after = "\nafter" if closed else ""
    assert NOTHING_KNOWN.redact(f"before\n{block}{after}") == f"before\n{MARK}{after}"


def test_pgp_private_key_is_redacted() -> None:
    begin, end = "-----BEGIN PGP PRIVATE " + "KEY BLOCK-----", "-----END PGP PRIVATE " + "KEY BLOCK-----"
    assert LETTERS not in NOTHING_KNOWN.redact(f"{begin}\n\n{LETTERS}\n{end}")


HARMLESS = [
    "",
    "PWD=/home/u/ws\nOLDPWD=/home/u",
    "commit 3f786850e387550fdab836ed7e6dc881de23001b",
    "* 3f78685 (HEAD -> main) Fix the token counter",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "550e8400-e29b-41d4-a716-446655440000",
    "run_0123456789abcdef0123456789abcdef",
    "call_0123456789abcdef01234567",
    "task-force",
    "risk-assessment-2024",
    "a desk-mounted monitor, a disk-utilization-report",
    "scikit-learn and sk-learn",
    "ask-me-anything-tomorrow",
    "max_tokens: 4096, total_tokens=123456, tokens: 123456789",
    "The tokenizer is tokenizer: gpt2-tokenizer-large",
    '{"properties": {"password": {"type": "string"}}, "required": ["password"]}',
    '{"token": null, "secret": true}',
    "Which password do you mean? The secret of success is the key to it.",
    "password=",
    "Bearer of bad news",
    "basic idea",
    "https://host.test:8443/path?a=b@c",
    "http://127.0.0.1:8642/v1",
    "user@example.com: see https://example.com/@someone",
    "npm install npm-check-updates",
    "npm_config_registry=https://registry.npmjs.org/",
    "from huggingface_hub import hf_hub_download",
    "pip install pypi-simple",
    "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
    "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----",
    "def f(token: str, password: str | None) -> None: ...",
    "interface Login { password: string; token: number }",
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUg==",
]


@pytest.mark.parametrize("text", HARMLESS)
def test_non_secrets_are_not_redacted(text: str) -> None:
    assert NOTHING_KNOWN.redact(text) == text


@given(st.text(max_size=60), st.sampled_from(sorted(KEYS)))
def test_redaction_is_idempotent(text: str, kind: str) -> None:
    once = NOTHING_KNOWN.redact(f"{text} {KEYS[kind]} token={text}")
    assert NOTHING_KNOWN.redact(once) == once


# ---- known values

# In Base64 it holds both + and /, where the two alphabets differ.
VALUE = "Tr0ub4dor&3 ???>>>/+"
STANDARD, ENCODED = base64.b64encode(VALUE.encode()).decode(), quote(VALUE, safe="")


@pytest.mark.parametrize(
    "form",
    [
        VALUE,
        STANDARD,
        STANDARD.rstrip("="),
        base64.urlsafe_b64encode(VALUE.encode()).decode(),
        ENCODED,
        quote(VALUE),
        quote_plus(VALUE),
        re.sub("%..", lambda match: match[0].lower(), ENCODED),
    ],
    ids=["plain", "base64", "without padding", "url-safe", "url-encoded", "path", "form", "small hex digits"],
)
def test_known_value_is_redacted_in_every_encoding(form: str) -> None:
    out = Secrets([VALUE]).redact(f"before {form} after")
    assert re.fullmatch(r"before \[redacted\]=* after", out)


def test_values_under_eight_characters_are_not_redacted() -> None:
    assert Secrets(["1234567", ""]).redact("call 1234567") == "call 1234567"
    assert Secrets(["12345678"]).redact("call 12345678") == "call [redacted]"


def test_longer_of_two_values_is_redacted_whole() -> None:
    secrets = Secrets(["abcdefgh", "abcdefghijkl"])
    assert secrets.redact("abcdefghijkl abcdefgh") == "[redacted] [redacted]"


def test_mask_hides_known_values_only() -> None:
    secrets = Secrets([VALUE])
    text = f"{VALUE} and {KEYS['openai']}"
    assert secrets.mask(text) == f"[redacted] and {KEYS['openai']}"
    assert NOTHING_KNOWN.mask(text) == text


def test_regex_characters_in_value_are_literal() -> None:
    assert Secrets(["a.c*(e)[g]"]).mask("abc*(e)[g] a.c*(e)[g]") == "abc*(e)[g] [redacted]"


def test_redacted_tree_keeps_its_shape() -> None:
    tree: Any = {"a": [f"x {VALUE}", 1, None, {"b": VALUE}], "c": True}
    assert redact_tree(tree, Secrets([VALUE]).redact) == {"a": ["x [redacted]", 1, None, {"b": MARK}], "c": True}


# ---- a stream

SECRET = "s3cr3t-v4lue"


def masked(values: list[str], pieces: list[str]) -> str:
    stream = Secrets(values).stream()
    return "".join([*(stream.feed(piece) for piece in pieces), stream.finish()])


def leaked(out: str, before: str, after: str) -> str:
    """What of the secret can be read between the text around it."""
    assert out.startswith(before) and out.endswith(after), out
    middle = out[len(before) : len(out) - len(after)]
    assert middle.endswith(MARK), out
    return middle.removesuffix(MARK)


@pytest.mark.parametrize(
    ("before", "after"), [("", ""), ("key: ", "!"), ("s3cr", " s3"), ("s3cr3t-v s3cr3t-", "s3cr3t-v"), ("s3", "lue")]
)
def test_stream_masks_secret_for_any_chunking(before: str, after: str) -> None:
    text = before + SECRET + after
    for pieces in all_cuts(text):
        beginning = leaked(masked([SECRET], pieces), before, after)
        assert len(beginning) < HELD_CHARS_MIN and SECRET.startswith(beginning), pieces


def test_stream_masks_repeated_secret() -> None:
    for pieces in cuts(f"{SECRET}{SECRET}", 3):
        out = masked([SECRET], pieces)
        assert SECRET not in out and out.count(MARK) == 2, pieces


def test_stream_masks_overlapping_values() -> None:
    values = [SECRET, "v4lue-and-more", "s3cr3t-other"]
    for text in (f"{SECRET}-and-more", "s3cr3t-s3cr3t-other", "s3cr3t-v4lue-and-mor"):
        for pieces in all_cuts(text):
            out = masked(values, pieces)
            assert not any(value in out for value in values), pieces


_alphabet = st.text(alphabet="ab", max_size=30)


@given(
    st.lists(st.text(alphabet="ab", min_size=8, max_size=12), min_size=1, max_size=3),
    _alphabet,
    _alphabet,
    st.data(),
)
def test_stream_masking_property(values: list[str], before: str, after: str, data: st.DataObject) -> None:
    text = before + data.draw(st.sampled_from(["", *values])) + after
    out = masked(values, any_cut(data, text))
    assert not any(value in out for value in values)
    if not any(value in text for value in values):
        assert out == text


def test_stream_holds_back_only_possible_secret() -> None:
    stream = Secrets([SECRET]).stream()
    assert stream.feed("hello s3cr3") == "hello s3cr3"
    assert stream.feed("t-") == ""
    assert stream.feed("x ") == "t-x "
    assert stream.finish() == ""


def test_stream_without_values_passes_through() -> None:
    stream = NOTHING_KNOWN.stream()
    assert stream.feed("anything") == "anything"
    assert stream.finish() == ""
