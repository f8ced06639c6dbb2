"""The Modelfile's grammar: what is read, what is refused and where, and that what is written is read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.store.modelfile import KEYWORDS, ROLES, Instruction, ModelfileError, decode, parse, write, written


def pairs(text: str) -> list[tuple[str, ...]]:
    return [(one.name, one.key, one.value) if one.key else (one.name, one.value) for one in parse(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FROM a", [("from", "a")]),
        ("from a:b\n", [("from", "a:b")]),
        ("\n\n  # c\nFROM   spaced  \n# end", [("from", "spaced")]),
        ("FROM a\r\nSYSTEM b\r\n", [("from", "a"), ("system", "b")]),
        ("FROM a\rSYSTEM b", [("from", "a"), ("system", "b")]),
        ("FROM a\nPARAMETER stop x", [("from", "a"), ("parameter", "stop", "x")]),
        ("FROM a\nPARAMETER   stop\t x y ", [("from", "a"), ("parameter", "stop", "x y")]),
        ("FROM a\nMESSAGE   User  hi there", [("from", "a"), ("message", "user", "hi there")]),
        ('FROM a\nSYSTEM "q"', [("from", "a"), ("system", "q")]),
        ('FROM a\nSYSTEM " q "  ', [("from", "a"), ("system", " q ")]),
        ('FROM a\nSYSTEM ""', [("from", "a"), ("system", "")]),
        ('FROM a\nSYSTEM """"""', [("from", "a"), ("system", "")]),
        ('FROM a\nSYSTEM """one\ntwo"""', [("from", "a"), ("system", "one\ntwo")]),
        ('FROM a\nSYSTEM """\none\n"""\nLICENSE x', [("from", "a"), ("system", "\none\n"), ("license", "x")]),
        ('FROM a\nSYSTEM "one\ntwo"', [("from", "a"), ("system", "one\ntwo")]),
        ('FROM a\nSYSTEM """one\n\n# no comment\n  two\t"""', [("from", "a"), ("system", "one\n\n# no comment\n  two\t")]),
        ('FROM a\nSYSTEM """He said "hi"."""', [("from", "a"), ("system", 'He said "hi".')]),
        ('FROM a\nSYSTEM say "hi"', [("from", "a"), ("system", 'say "hi"')]),
        ('FROM a\nSYSTEM """"quoted""""', [("from", "a"), ("system", '"quoted"')]),
        ("FROM a\nSYSTEM 'single'", [("from", "a"), ("system", "'single'")]),
        ("FROM a\nSYSTEM a \\n b", [("from", "a"), ("system", "a \\n b")]),
        ("FROM a\nSYSTEM # not a comment", [("from", "a"), ("system", "# not a comment")]),
        ("FROM a\nSYSTEM <<END\nx\n\"\"\"\n END\nEND\nLICENSE y", [("from", "a"), ("system", 'x\n"""\n END'), ("license", "y")]),
        ("FROM a\r\nSYSTEM <<END\r\nx\r\ny\r\nEND\r\n", [("from", "a"), ("system", "x\r\ny")]),
        ("FROM a\nSYSTEM <<SYS>> x", [("from", "a"), ("system", "<<SYS>> x")]),
        ("FROM a\nTEMPLATE {{ x }}\nADAPTER ./l\nREQUIRES 0.1\nRENDERER r\nPARSER p\nDRAFT d",
         [("from", "a"), ("template", "{{ x }}"), ("adapter", "./l"), ("requires", "0.1"), ("renderer", "r"), ("parser", "p"),
          ("draft", "d")]),
        ("FROM a\nFROM b", [("from", "a"), ("from", "b")]),
        ("FROM a\nSYSTEM 안녕 🙂", [("from", "a"), ("system", "안녕 🙂")]),
    ],
)  # fmt: skip
def test_grammar(text: str, expected: list[tuple[str, ...]]) -> None:
    assert pairs(text) == expected
    assert pairs("\ufeff" + text) == expected
    assert pairs(write(parse(text))) == expected


@pytest.mark.parametrize(
    ("text", "line", "column", "problem"),
    [
        ("", 1, 1, "no FROM line"),
        ("# only\nSYSTEM x\n", 3, 1, "no FROM line"),
        ("FROM a\n  BOGUS x", 2, 3, 'command must be one of "from", "license", .*, or "requires"'),
        ("FROM a\nSYSTEMx y", 2, 1, "command must be one of"),
        ("FROM", 1, 5, "FROM needs a value"),
        ("FROM a\r\nSYSTEM  \r\nLICENSE x", 2, 9, "SYSTEM needs a value"),
        ("FROM a\nPARAMETER", 2, 10, "PARAMETER needs a name"),
        ("FROM a\nPARAMETER temperature", 2, 22, "PARAMETER temperature needs a value"),
        ("FROM a\nMESSAGE robot hi", 2, 9, 'message role must be one of "system", "user", or "assistant"'),
        ("FROM a\nMESSAGE", 2, 8, "message role must be"),
        ("FROM a\nMESSAGE user", 2, 13, "MESSAGE user needs a value"),
        ('FROM a\nSYSTEM """open\nnever', 2, 8, 'unexpected EOF: no line ends with the """'),
        ('FROM a\nSYSTEM "open', 2, 8, 'unexpected EOF: no line ends with the "'),
        ("FROM a\nSYSTEM <<END\nx\n", 2, 8, "unexpected EOF: no line is END"),
        ('FROM a\nSYSTEM """\n"""" x', 2, 8, "unexpected EOF"),
    ],
)
def test_errors_have_line_and_column(text: str, line: int, column: int, problem: str) -> None:
    with pytest.raises(ModelfileError, match=rf"^line {line}, column {column}: {problem}") as caught:
        parse(text)
    assert (caught.value.line, caught.value.column, caught.value.status) == (line, column, 400)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings(encoding: str) -> None:
    assert pairs(decode("FROM 모델\n".encode(encoding))) == [("from", "모델")]


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(ModelfileError, match=r"^line 2, column 8: this is not UTF-8 text$"):
        decode(b"FROM a\nSYSTEM \xff\xfe")


VALUES = (
    st.text()
    | st.text(alphabet='a"\n\r #<END_\t ')
    | st.text(alphabet='"\n\ra ').map(lambda text: f'a"""\nb{text}')
    | st.text(alphabet="END\n\r_").map(lambda text: f'"""\r{text}')
    | st.text(alphabet='"\n', max_size=9)
)
PLAIN = [keyword for keyword in KEYWORDS if keyword not in ("parameter", "message")]
INSTRUCTIONS = st.lists(
    st.builds(Instruction, st.sampled_from(PLAIN), VALUES)
    | st.builds(lambda role, value: Instruction("message", value, role), st.sampled_from(ROLES), VALUES)
    | st.builds(lambda key, value: Instruction("parameter", value, key), st.sampled_from(["stop", "temperature"]), VALUES),
    max_size=5,
)


@given(INSTRUCTIONS)
def test_whatever_is_written_is_read_back(instructions: list[Instruction]) -> None:
    whole = [Instruction("from", "x"), *instructions]
    assert parse(write(whole, ("a comment", ""))) == whole


@given(st.text(alphabet='FROMfromsyte xSYSTEM"\n\r #<END'))
def test_any_text_is_a_modelfile_or_one_line(text: str) -> None:
    try:
        parse(text)
    except ModelfileError as error:
        assert "\n" not in str(error) and error.line >= 1 and error.column >= 1


def test_quotes_are_used_only_where_they_must() -> None:
    assert written("plain text") == "plain text"
    assert written(" outer") == '" outer"'
    assert written("a\nb") == '"""a\nb"""'
    assert written('"begins') == '""begins"'
