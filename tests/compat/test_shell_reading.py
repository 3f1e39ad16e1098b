"""Shell scripts are taken apart as the shell would, and whatever they hold ends in flags or in one message."""

import re
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.compat.import_slime.script import read_script
from strop.types import UserError


@pytest.fixture
def flags_of(tmp_path):
    """The flags of a launch and the words after them, flattened."""

    def read(text):
        path = tmp_path / "run.sh"
        path.write_text(text)
        return [word for flag in read_script(path).flags for word in (flag.name, *flag.values)]

    return read


SCRIPTS = {
    "quotes": """python3 train.py --a 'one two' --b "three four" --c fi'v'e 'ni'ne --d "" --e""",
    "escapes": r"""python3 train.py --a one\ two --b "a\"b\\c\$d" --c \#no --d 'a\b' """,
    "continued lines": "python3 train.py \\\n  --a 1 \\\n  --b 2\n",
    "windows' line ends": "A=(\r\n --a 1\r\n)\r\npython3 train.py ${A[@]}\r\n",
    "comments": "# no ' quote\nA=( # none\n --a 1 # '\n # --b 2\n --c a#b\n)\npython3 train.py ${A[@]} # --d",
    "arrays": "A=(--a 1)\nB=('x y' z)\nA+=(--b)\npython3 train.py ${A[@]} \"${B[@]}\" --c",
    "an array in an array": 'A=(--a "1 2")\nB=("${A[@]}" --b)\npython3 train.py "${B[@]}"',
    "variables": 'X=1\nY="$X $X"\nX=2\npython3 train.py --a $X --b "${Y}" --c a${X}b --d $Y --e "$Y$X"',
    "added text": "X=--a\nX+=bc\npython3 train.py $X 1",
    "defaults": 'E=\npython3 train.py --a ${U:-3} --b ${E:-4} --c "${E-5}" --d ${X:-a b} --e "${U:-"q"}" --f ${E:+no} ${U+no}',
    "empty and unset": 'E=\npython3 train.py --a $E --b "$E" --c',
    "an element": "A=(--a 7)\npython3 train.py ${A} 1",
    "exported": "export X=3 Y=4\nreadonly Z=5\nlocal_x=6\npython3 train.py --a $X$Y$Z$local_x",
    "redirected": "python3 train.py --a 1 2>&1 >> log --b 2 2> err < /dev/null | cat",
    "ends of commands": "X=1; python3 train.py --a $X && echo --b\ntrue & true",
    "here-document": "cat <<'END' >/dev/null\npython3 train.py --no 'quote\nEND\npython3 train.py --a 1",
    "json": 'J="{\\"a\\": {\\"b\\": 1}}"\npython3 train.py --a="$J" --b \'{"x": "y"}\'',
    "an element that is set": """A=(--a 1 --b)\nA[1]=7\nI=2\nA[$I]=--c\nA[I+1]='x y'\nA[-1]+=z
        python3 train.py "${A[@]}" """,
    "parts of arrays": """A=(a b c d)
        python3 train.py --x "${A[@]:1:2}" --y ${A[@]:2} --z ${#A[@]} ${A[1]} ${A[-1]} "${A[*]}" """,
    "parts of values": """D=/a/b.tar.gz
        python3 train.py --a ${D%.gz} ${D%%.*} ${D#*/} ${D##*/} ${D/b/c} ${D//a/} ${D:1:3} ${#D}""",
    "patterns in values": """D=aXbXc\nS=X
        python3 train.py --a ${D/$S*/_} ${D/#a/_} ${D/%c/_} ${D//[ab]/-} ${D^^} ${D,,} ${D%"$S"*}""",
    "sums": """N=8
        python3 train.py --a $((N * 4)) $((N/3*2)) $(( ($N + 1) % 4 )) $((-7/2)) $((2**3)) x$((N))y $((N>7))""",
    "quotes with escapes": r"""python3 train.py --a $'one\ttwo' --b $"three" --c 'x'$'\'y'""",
    "functions": """ADD=()
        add() { ADD+=("$@"); }
        function run { python3 train.py "${ADD[@]}" "$@" --n $# --f "$1"; }
        add --a "1 2"\nadd --b\nrun --c 3""",
    "functions in functions": "f() { g --a $1; }\ng() { shift; python3 train.py --b ${2:-9} $*; }\nf 5",
    "the script's own words": 'set -- --a "1 2"\npython3 train.py "$@" --n $#\n',
    "conditions": """M=x
        if [ $M = y ]; then A=(--no); elif [[ $M == x* && -n $M ]]; then A=(--a); else A=(--no); fi
        python3 train.py ${A[@]}""",
    "conditions on numbers": """N=8
        [ $N -gt 4 ] && A=1 || A=2
        (( N < 4 )) && B=1 || B=2
        [[ $N -ne 8 ]] || C=3
        python3 train.py --a $A $B $C""",
    "conditions on emptiness": """E=
        [ -z "$E" ] && A=1
        [ -n "$E" ] || B=2
        ! [ "$E" ] && C=3
        [[ ! -z $E ]] || D=4
        python3 train.py --a $A $B $C $D""",
    "a case": """M=fast
        case "$M" in
          slow|s*) A=1 ;;
          (f*|"x") A=2 ;;
          *) A=3 ;;
        esac
        python3 train.py --a $A""",
    "loops": """A=()
        for i in 1 2 3; do A+=(--a$i); for j in x y; do A+=($i$j); done; done
        python3 train.py ${A[@]}""",
    "a loop over an array": """B=("1 2" 3)\nA=()
        for b in "${B[@]}"; do A+=(--a "$b"); done
        python3 train.py "${A[@]}" """,
    "blocks": "{ X=1; }\nX=2 && { Y=3; Z=4; }\npython3 train.py --a $X $Y $Z",
    "eval": "C='python3 train.py --a \"1 2\"'\neval $C",
    "a function": "f() {\n  echo hi\n}\nf\npython3 train.py --a 1",
}


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_words_are_those_of_bash(flags_of, text, tmp_path):
    """bash itself says what it would have passed: python3 prints its arguments there."""
    shell = 'python3() { shift; printf "%s\\n" "$@" >&9; }\n' + text.replace("\r", "")
    listed = tmp_path / "listed"
    command = ["bash", "-c", f"exec 9>{listed}\n{shell}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)
    expected = listed.read_text().split("\n")[:-1]
    found = flags_of(text)
    assert found == [part for word in expected for part in (word.split("=", 1) if word.startswith("--") else [word])]


@pytest.mark.parametrize(
    "folder",
    [
        '$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)',
        '$(cd "$(dirname "$0")" && pwd)',
        '$(dirname "$0")',
        '$(dirname "${BASH_SOURCE[0]}")/.',
        '$(cd "$(dirname "$0")/../x" && pwd)',
        '$(cd "$(dirname "${BASH_SOURCE[0]}")/../x" > /dev/null 2>&1 && pwd -P)',
    ],
)
def test_the_folder_of_the_script_is_known(folder, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/more.sh").write_text("MORE=(--b 2)")
    (tmp_path / "x/run.sh").write_text(f'D="{folder}"\nsource "$D/more.sh"\npython3 train.py --a "$D" ${{MORE[@]}}')
    a, b = read_script(tmp_path / "x/run.sh").flags
    assert (a.values, b.values) == ((str(tmp_path / "x"),), ("2",)) or a.values[0].startswith(str(tmp_path / "x"))
    assert not a.unknown


def test_a_sourced_file_finds_its_own_folder(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    here = 'D="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"'
    (tmp_path / "two/b.sh").write_text("B=(--b 2)")
    (tmp_path / "two/a.sh").write_text(f'{here}\nsource "$D/b.sh"')
    (tmp_path / "one/run.sh").write_text(f'{here}\n. "$D/../two/a.sh"\npython3 train.py ${{B[@]}} --d $D')
    assert [flag.values for flag in read_script(tmp_path / "one/run.sh").flags] == [("2",), (str(tmp_path / "two"),)]


def test_the_launch_of_train_is_taken_before_that_of_another_program(flags_of):
    text = "python3 tools/convert.py --x 1\npython3 train_async.py --a 2\npython3 eval.py --y 3"
    assert flags_of(text) == ["--a", "2"]


PIECES = st.sampled_from([" ", "\n", "\\\n", "\t", "\r\n", "\0", "é", "'", '"', "`", "\\"]) | st.sampled_from(
    re.split(
        r"\s+",
        """$ ${ } $( ) ( # ; & && | || < > << <<E E = += A= A=( A+=( ${A[@]} ${A:-x} $A ${A%.x} ${#A} $@ $((1+1)) [[ ]] if
        then fi for in do done case esac ;; { } source . export -a python3 train.py --lr --a=1 1 x ! 2>&1 &>""",
    )
)


@settings(derandomize=True, deadline=None, max_examples=1500, suppress_health_check=list(HealthCheck))
@given(st.lists(PIECES, max_size=25).map("".join))
def test_whatever_a_script_holds_ends_in_flags_or_one_message(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.sh"
    path.write_text(text + "\npython3 train.py --lr 1\n")
    try:
        script, message = read_script(path), f"{path} is fine"
    except UserError as error:
        script, message = None, str(error)
    assert script is None or script.flags
    assert message.startswith(str(path))
    assert "\n" not in message
