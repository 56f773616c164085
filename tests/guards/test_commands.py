"""Commands fall under the rules they should, however they are written; everyday ones under none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes.guards import commands, rules
from hermes.guards.commands import Facts, check, detaches, simple_forms
from hermes.guards.shell_expansion import UNKNOWN, plain

CWD = "/home/u/ws"
FACTS = Facts((CWD,), "/home/u", "/home/u/.hermes")


def table() -> dict[str, list[tuple[frozenset[str], str]]]:
    """The sections of the table of commands: what each falls under, and the command."""
    sections: dict[str, list[tuple[frozenset[str], str]]] = {}
    for line in (Path(__file__).parent / "commands.txt").read_text("utf-8").splitlines():
        if line.startswith("## "):
            section = sections.setdefault(line[3:], [])
        elif "\t" in line and not line.startswith("#"):
            expected, _, command = line.partition("\t")
            section.append((frozenset(expected.split()) - {"-"}, command.replace("⏎", "\n")))
    return sections


TABLE = table()


def rules_of(command: str, cwd: str = CWD, facts: Facts = FACTS) -> frozenset[str]:
    """The names of the rules a command falls under."""
    return frozenset(hit.rule for hit in check(command, cwd, facts))


@pytest.mark.parametrize("section", TABLE)
def test_command_rules_table(section: str) -> None:
    wrong = [
        (command, sorted(expected), sorted(rules))
        for expected, command in TABLE[section]
        if (rules := rules_of(command)) != expected
    ]
    assert not wrong


def test_command_rules_table_is_large_enough() -> None:
    rows = [row for section in TABLE.values() for row in section]
    assert len(rows) >= 300 and len({command for _, command in rows}) == len(rows)
    assert len([row for row in rows if not row[0]]) >= 100
    assert {rule for expected, _ in rows for rule in expected} == set(rules.CLASSES)


def test_hit_names_class_and_matched_text() -> None:
    assert {(hit.rule, hit.klass, hit.detail) for hit in check("ls; r''m  -rf 'a b' > /dev/null", CWD, FACTS)} == {
        ("delete", "W", "rm -rf 'a b'")
    }
    details = {hit.rule: (hit.klass, hit.detail) for hit in check("curl x | sudo sh", CWD, FACTS)}
    assert details["remote"] == ("N", "curl x | sudo sh")
    assert details["opaque"] == ("S", "sudo sh (a text that is run)")
    (hit,) = check("sh <<< 'git reset --hard'", CWD, FACTS)
    assert hit.detail == "sh <<< 'git reset --hard\n'", "a text that is run belongs to what may be allowed"


def test_command_rules_depend_on_cwd_and_facts() -> None:
    assert rules_of("rm -rf *", "/") >= {"hard"}
    assert rules_of("rm -rf *", "/home/u") >= {"hard"}
    assert rules_of("rm -rf *") == {"delete"}
    assert rules_of("rm -rf /data", facts=Facts((CWD,), "/data/users/u", "/x")) == {"hard", "delete"}
    assert rules_of("chmod -R 755 /srv/x") == {"perms"}
    assert rules_of("chmod -R 755 /srv/x", facts=Facts((CWD, "/srv"), "/home/u", "/x")) == frozenset()
    inside = Facts(("/h/.hermes/workspace",), "/h", "/h/.hermes")
    assert rules_of("touch x ../config.yaml", "/h/.hermes/workspace", inside) == {"agent"}
    assert rules_of("touch x sub/y", "/h/.hermes/workspace", inside) == frozenset()


def test_command_rules_expand_known_variables() -> None:
    known = Facts((CWD,), "/home/u", "/home/u/.hermes", env={"X": "rm", "D": "build"})
    assert rules_of("$X -rf $D", facts=known) == {"delete"}
    assert rules_of("$X -rf /$NONE", facts=known) == {"hard", "delete"}
    assert rules_of("$X -rf $D") == {"opaque"}


def test_overwrite_rule_checks_whether_file_exists() -> None:
    paths: list[str] = []

    def exists(path: str) -> bool:
        paths.append(path)
        return path == "/tmp/old"

    command = "echo a > /tmp/old; echo b > /tmp/new; echo c >> /tmp/old; echo d > here; echo e > /dev/null"
    assert [hit.detail for hit in check(command, CWD, FACTS, exists)] == ["echo a > /tmp/old"]
    assert paths == ["/tmp/old", "/tmp/new"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("sleep 5 &", True),
        ("nohup x", True),
        ("sudo nohup x", True),
        ("setsid -f x", True),
        ("x & disown", True),
        ("ls; (x &)", True),
        ("{ x & }", True),
        ("a && b & wait", True),
        ("ls", False),
        ("a && b", False),
        ("ls 2>&1 &>/dev/null", False),
        ("echo '&'", False),
        ("for i in 1 2; do x & done; wait", False),
        ("x=$(y & wait)", False),
        ("bash -c 'x & wait'", False),
        ("f() { x & }", False),
        ("cat <<E\nx &\nE", False),
        ("'", False),
    ],
)
def test_detached_commands(command: str, expected: bool) -> None:
    assert detaches(command) is expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("git   status", ["git status"]),
        ("cd x&&'git' pu''ll # why", ["cd x", "git pull"]),
        ('x=1; echo $x | grep "a b"', ["x=1", "echo 1", "grep 'a b'"]),
        ("A=b make test > out.txt 2>&1", ["A=b make test", "> out.txt"]),
        ("ls *.py $(date)", ["date", "ls *.py '…'"]),
        ("sudo apt install x", ["sudo apt install x"]),
        ("$x", []),
        ('eval "$y"', []),
        ("ls '", []),
        ("", []),
    ],
)
def test_simple_forms(command: str, expected: list[str]) -> None:
    assert simple_forms(command) == expected


def test_hit_detail_is_a_simple_form() -> None:
    command = "cd build && rm -rf ~/x/*"
    (hit,) = check(command, CWD, FACTS)
    assert hit.detail in simple_forms(command, CWD, FACTS)


OPENINGS = """( $( $(( { {a, {a,b} ` ' " \\a <<a a; a| a&& a|| $a ${a:-b} ${ sh~-c~'a'; sudo~ [[~ case~a~in~a) for~a~in~a;do~
if~a;then~ while~a=1;do~ f(){~ >a~ <(a)~ $((1))~ {1..200}~ a=b~ a+=(b); a=$a$a; rm~-r~a; kill~-9~1; *~ /*~ [~ # é git~x;"""
HOSTILE = [
    *(opening.replace("~", " ") * (100_000 // len(opening)) for opening in OPENINGS.split()),
    "rm -rf /" + "*a" * 50_000,
    "rm " + " ".join(f"/{number}*" for number in range(14_000)),
    "for a in 1 2 3 4 5 6 7 8; do " * 12 + "b;" + "done;" * 12,
    "f(){ f;f;};f",
    "python -c '" + "exec(" * 20_000 + "'",
    "psql -c '" + "update x set " * 8_000 + "'",
    "psql -c '" + "/*" * 50_000 + "'",
    "chmod " + "a," * 50_000 + "b c",
    "cat <<E\n" + "a\\\n" * 30_000,
]


@pytest.mark.parametrize("command", HOSTILE, ids=lambda command: command[:10])
def test_long_and_deep_commands_terminate(command: str) -> None:
    assert all(rules.CLASSES[hit.rule] == hit.klass for hit in check(command, CWD, FACTS))


def test_too_deeply_nested_command_is_opaque() -> None:
    assert rules_of("( " * 200 + "ls" + " )" * 200) == {"opaque"}
    assert rules_of("echo " + "$(echo " * 200 + ")" * 200) == {"opaque"}
    assert rules_of("sudo " * 5 + "ls") == frozenset()
    assert rules_of("sudo " * 6 + "ls") == {"opaque"}


SIGNS = " \t\n;|&<>(){}[]'\"\\$`*?~#=!-,./"
PARTS = """$( ${ $(( )) $' <<E <<< >& && || ;; rm -rf / if then fi for in do done case esac while function x=1 $x ${x:-y} {a,b}
{1..3} sh -c eval sudo find -exec"""
FRAGMENTS = st.sampled_from([*SIGNS, *PARTS.split(), "\nE\n"])


@given(
    st.one_of(st.text(), st.lists(FRAGMENTS, max_size=40).map("".join), st.lists(FRAGMENTS, max_size=20).map(" ".join))
)
def test_any_command_text_gets_verdict_property(command: str) -> None:
    for hit in check(command, CWD, FACTS):
        assert rules.CLASSES[hit.rule] == hit.klass
    detaches(command)
    simple_forms(command)


PLAIN_COMMANDS = [
    ("hard", ["rm", "-rf", "/"]),
    ("hard", ["rm", "-r", "/usr"]),
    ("hard", ["rm", "-fr", "/home/u"]),
    ("hard", ["mkfs.ext4", "/dev/sda"]),
    ("hard", ["dd", "if=/dev/zero", "of=/dev/sda"]),
    ("hard", ["shutdown", "-h", "now"]),
    ("hard", ["kill", "-9", "-1"]),
    ("hard", ["find", "/", "-delete"]),
    ("delete", ["rm", "-rf", "build"]),
    ("delete", ["shred", "file"]),
    ("delete", ["find", ".", "-name", "x", "-delete"]),
    ("git", ["git", "reset", "--hard"]),
    ("procs", ["pkill", "node"]),
    ("containers", ["docker", "rm", "x"]),
]
WRAPPINGS = [
    "{}",
    "sudo {}",
    "env A=1 {}",
    "bash -c '{}'",
    "eval '{}'",
    "timeout 5 {}",
    "true && {}",
    "if true; then {}; fi",
]
WRAPPINGS += [
    "({})",
    "x=$({})",
    "echo `{}`",
    "nice -n 3 {}",
    "for i in 1; do {}; done",
    "bash <<'E'\n{}\nE\n",
    "f() {{ {}; }}; f",
]


@st.composite
def disguised(draw: st.DrawFn) -> tuple[str, str]:
    """A rule, and a command that falls under it, written in some roundabout way."""
    rule, args = draw(st.sampled_from(PLAIN_COMMANDS))
    wrapping = draw(st.sampled_from(WRAPPINGS))
    within_quotes = "'" in wrapping and "<<" not in wrapping
    before: list[str] = []

    def piece(text: str) -> str:
        way = draw(st.integers(0, 8))
        if way == 0 and not within_quotes:
            return f"'{text}'"
        if way == 1:
            return f'"{text}"'
        if way == 2:
            return "".join("\\" + char for char in text)
        if way == 3 and not within_quotes:
            return (
                "$'"
                + "".join(
                    draw(st.sampled_from([f"\\x{ord(c):02x}", f"\\{ord(c):03o}", f"\\u{ord(c):04x}"])) for c in text
                )
                + "'"
            )
        if way == 4:
            name = f"v{len(before)}"
            before.append(f"export {name}={text}; ")
            return draw(st.sampled_from([f"${{{name}}}", f'"${{{name}}}"', f'"${name}"', f"${{{name}:-x}}"]))
        if way == 5:
            return draw(
                st.sampled_from(
                    [f"$(echo {text})", f'"$(printf %s {text})"', f"${{none:-{text}}}", f"{text}$@", f'{text}""']
                )
            )
        return text

    def word(text: str) -> str:
        cuts = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=3)))
        return "".join(piece(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) if text[a:b])

    gap = draw(st.sampled_from([" ", "  ", "\t", "${IFS}", " \\\n ", "$IFS$9"]))
    inner = gap.join(map(word, args))
    return rule, "".join(before) + wrapping.format(inner)


@given(disguised())
def test_disguised_commands_are_detected(case: tuple[str, str]) -> None:
    rule, command = case
    assert rules_of(command) & {rule, "opaque"}, command


WORDS = r"""
a'b c'"d e"\ f|${v}x"$v"|$w|"$w"|${w:-z}|${u:-z y}|${u:-'z y'}|"${u:-z y}"|${v:+q}|${v:1:2}|"${a[@]}"|${a[1]}|$a|"${a[*]}"
$(echo x y)|"$(echo x y)"|`echo z`|$'\x41\101\u0041\n'|{a,b}c|{a,{b,c}}|{1..3}|{c..a}|{a}|{}|x{,y}|{'a b',c}|~|~/x|'~'|$@|"$@"|$1
"$1"|""|''|$e|"$e"|a$e"b"|\$v|'$v'|"\$v\a"|$((1))|x=~/y|\{a,b}|"{a,b}"|$"t"|a\
b|$v$v|"$v"{x,y}|*|'*'|${v}{x,y}
"""


@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash to compare with")
def test_word_expansion_matches_bash() -> None:
    patterns = [
        word.strip("\n")
        for word in WORDS.replace("\n\n", "\n")
        .strip()
        .replace("\\\nb", "\0")
        .replace("\n", "|")
        .replace("\0", "\\\nb")
        .split("|")
    ]
    script = "set -f; v=rm; w='p  q'; e=; a=(x 'y z'); set -- 1 '2 3'\n" + "\n".join(f"p {word}" for word in patterns)
    show = "p() { printf '%s\\0' \"$@\"; printf '\\1'; }\n"
    result = subprocess.run(
        ["bash", "-c", show + script], capture_output=True, text=True, check=True, env={"HOME": "/home/u"}
    )
    expected = [tuple(line.split("\0")[:-1]) for line in result.stdout.split("\1")[:-1]]

    class Seen(commands._CommandAnalyzer):
        expansions: list[tuple[str, ...]]

        def call(self, argv: list[str], feed: str | None) -> str | None:
            if argv[0] != "p":
                return super().call(argv, feed)
            self.expansions.append(tuple(plain(arg) for arg in argv[1:]))
            return ""

    judge = Seen(CWD, Facts((CWD,), "/home/u", "/h", env={}))
    judge.expansions = []
    judge.begin(script)
    assert not judge.opaque and not any(UNKNOWN in arg for args in judge.expansions for arg in args)
    printed = [args or ("",) for args in expected]
    assert [args or ("",) for args in judge.expansions] == printed
