"""How often loops run, derived from small programs of which XLA does not say it."""

import pytest

from jdp.tools import hlo
from jdp.tools.timeline import TripCounts

STATE = "(s32[]{:T(128)}, f32[8]{0}, s32[])"
ENTER = (
    "%p = STATE parameter(0)", "%i = s32[] get-tuple-element(%p), index=0",
    "%x = f32[8]{0} get-tuple-element(%p), index=1", "%n = s32[] get-tuple-element(%p), index=2",
)  # fmt: skip
LEAVE = "ROOT %after = STATE tuple(%next, %x, /*index=2*/%n)"
COUNT_UP = ("%one = s32[] constant(1)", "%next = s32[]{:T(128)S(6)} add(%i, %one)", LEAVE)
BELOW_7 = ("%seven = s32[]{:T(128)} constant(7), metadata={op_name=\"it\"}",
           "ROOT %lt = pred[] compare(%i, %seven), direction=LT")  # fmt: skip
BELOW_N = ("ROOT %lt = pred[] compare(%i, %n), direction=LT",)
LOOP = "%loop = STATE while(%state), condition=%below, body=%body"
START = (
    "%y = f32[8]{0} parameter(0)", "%zero = s32[] constant(0)", "%ten = s32[] constant(10)",
    "%first = s32[] copy(%zero)", "%state = STATE tuple(%first, %y, %ten)", LOOP,
)  # fmt: skip


def computation(name, *lines):
    body = "\n".join(f"  {line}" for line in lines).replace("STATE", STATE)
    return f"{name} () -> f32[] {{\n{body}\n}}\n"


def times(condition=BELOW_7, body=COUNT_UP, start=START, others=(), within="main"):
    """How often the loop of a program runs, None if nothing is claimed."""
    text = "\n".join([
        computation("%below", *ENTER, *condition), computation("%body", *ENTER, *body), *others,
        computation("ENTRY %main", *start),
    ])  # fmt: skip
    computations, _ = hlo.parse(text)
    (loop,) = [one for one in computations[within] if one.name == "loop"]
    try:
        return TripCounts(computations).times(loop, within)
    except ValueError as error:
        assert "loop loop" in str(error)
        return None


def compared(direction, bound, sides="%i, %end"):
    return (f"%end = s32[] constant({bound})",
            f"ROOT %lt = pred[] compare({sides}), direction={direction}")  # fmt: skip


def steps_of(*steps):
    """A body whose counter takes several steps, as one that XLA unrolled does."""
    names = ["i", *(f"next{k}" for k in range(1, len(steps))), "next"]
    added = [f"%by{k} = s32[] constant({step})" for k, step in enumerate(steps)]
    sums = [f"%{names[k + 1]} = s32[] add(%by{k}, %{names[k]})" for k in range(len(steps))]
    return (*added, *sums, LEAVE)


def starting_at(value):
    return tuple(line.replace("constant(0)", f"constant({value})") for line in START)


@pytest.mark.parametrize(("direction", "first", "step", "bound", "count"), [
    ("LT", 0, 1, 7, 7), ("LE", 0, 1, 7, 8), ("NE", 0, 1, 7, 7), ("LT", 3, 2, 8, 3),
    ("GT", 7, -1, 0, 7), ("GE", 7, -2, 0, 4), ("LT", 7, 1, 7, 0), ("GE", -1, -1, 0, 0),
    ("NE", 5, -5, -10, 3),
    # These do not end before the counter wraps around.
    ("LT", 0, -1, 7, None), ("NE", 0, 2, 7, None), ("LE", 0, 1, 2**31 - 1, None),
    ("LT", 0, 0, 7, None),
])  # fmt: skip
def test_a_loop_runs_until_its_counter_reaches_the_bound(direction, first, step, bound, count):
    start, body = starting_at(first), steps_of(step)
    assert times(compared(direction, bound), body, start) == count
    # The same with the bound on the left.
    flipped = direction.translate(str.maketrans("LG", "GL")) if direction != "NE" else "NE"
    assert times(compared(flipped, bound, "%end, %i"), body, start) == count


def test_an_unrolled_body_runs_less_often():
    assert times(compared("LT", 12), steps_of(1, 1)) == 6
    assert times(compared("LT", 12), steps_of(1, 1, 1, 1)) == 3


def test_a_bound_that_is_carried_is_followed_to_its_constant():
    assert times(BELOW_N) == 10
    grows = ("%next = s32[] add(%i, %n)", LEAVE)  # by a bound that nothing says is constant
    assert times(BELOW_N, grows) is None


def test_what_the_program_says_comes_first():
    said = LOOP + ', backend_config={"known_trip_count":{"n":"4"}}'
    assert times(start=(*START[:-1], said)) == 4


def test_a_counter_is_found_in_fusions_and_copies():
    others = [
        computation("%add", "%a = s32[] parameter(0)", "%b = s32[] constant(1)",
                    "ROOT %c = s32[] add(%a, %b)"),
        computation("%less", "%a = s32[] parameter(1)", "%b = s32[] parameter(0)",
                    "ROOT %c = pred[] compare(%b, %a), direction=LT"),
        computation("%both", "%a = s32[] constant(2)", "%b = s32[] constant(0)",
                    "ROOT %c = (s32[], s32[]) tuple(%a, %b)"),
    ]  # fmt: skip
    condition = ("ROOT %lt = pred[] fusion(%i, %n), kind=kLoop, calls=%less",)
    body = ("%begun = (s32[], s32[], u32[]) copy-start(%i)", "%copied = s32[] copy-done(%begun)",
            "%next = s32[] fusion(%copied), kind=kLoop, calls=%add", LEAVE)  # fmt: skip
    start = (START[0], "%made = (s32[], s32[]) fusion(), kind=kLoop, calls=%both", START[2],
             "%first = s32[] get-tuple-element(%made), index=0", *START[4:])  # fmt: skip
    assert times(condition, body, start, others) == 8


@pytest.mark.parametrize(("body", "others"), [
    # The counter becomes a product, a number of the data, another entry, or one of two values.
    (("%two = s32[] constant(2)", "%next = s32[] multiply(%i, %two)", LEAVE), ()),
    (("%next = s32[] custom-call(%x), custom_call_target=\"it\"", LEAVE), ()),
    (("%one = s32[] constant(1)", "%next = s32[] add(%n, %one)", LEAVE), ()),
    (("%next = s32[] add(%i, %i)", LEAVE), ()),
    (("%next = s32[] conditional(%i, %i, %i), branch_computations={%other, %other}", LEAVE),
     [computation("%other", "%a = s32[] parameter(0)", "%b = s32[] constant(1)",
                  "ROOT %c = s32[] add(%a, %b)")]),
])  # fmt: skip
def test_nothing_is_claimed_of_a_counter_that_does_not_grow_evenly(body, others):
    assert times(body=body, others=others) is None


@pytest.mark.parametrize("condition", [
    # An early end, a bound or a counter that the data decide, and a loop until equal.
    (*BELOW_7[:1], "%a = pred[] compare(%i, %seven), direction=LT",
     "%b = pred[] custom-call(%x), custom_call_target=\"it\"", "ROOT %c = pred[] and(%a, %b)"),
    ("%b = s32[] custom-call(%x), custom_call_target=\"it\"",
     "ROOT %c = pred[] compare(%i, %b), direction=LT"),
    ("%b = f32[] constant(7)", "ROOT %c = pred[] compare(%x, %b), direction=LT"),
    compared("EQ", 0), ("ROOT %c = pred[] get-tuple-element(%p), index=3",),
])  # fmt: skip
def test_nothing_is_claimed_of_a_condition_that_is_not_a_bound(condition):
    assert times(condition) is None


def test_nothing_is_claimed_of_a_first_value_or_bound_that_is_an_argument():
    argument = "%zero = s32[] parameter(1)"
    assert times(start=(START[0], argument, *START[2:])) is None
    bound = "%ten = s32[] parameter(1)"
    start = (*START[:2], bound, *START[3:])
    assert times(start=start) == 7 and times(BELOW_N, start=start) is None


def test_nothing_is_claimed_where_both_sides_change():
    both = ("%one = s32[] constant(1)", "%next = s32[] add(%i, %one)",
            "%n1 = s32[] constant(-1)", "%less = s32[] add(%n, %n1)",
            LEAVE.replace("%n)", "%less)"))  # fmt: skip
    assert times(BELOW_7, both) == 7 and times(BELOW_N, both) is None


def test_an_unsigned_counter_that_wraps_around_is_not_counted():
    minus = (
        "%m = u32[] constant(4294967295)",
        "%less = u32[] add(%i, %m)",
        "%end = u32[] constant(7)",
        "ROOT %lt = pred[] compare(%less, %end), direction=LT",
    )
    assert times(minus, start=starting_at(1)) is None


OUTER = (
    "%q = STATE parameter(0)", "%j = s32[] get-tuple-element(%q), index=0",
    "%y = f32[8]{0} get-tuple-element(%q), index=1", "%m = s32[] get-tuple-element(%q), index=2",
    "%zero = s32[] constant(0)", "%state = STATE tuple(FIRST, %y, %m)", LOOP,
    "%z = f32[8]{0} get-tuple-element(%loop), index=1",
    "%end = s32[] get-tuple-element(%loop), index=2",
    "%one = s32[] constant(1)", "%up = s32[] add(%j, %one)",
    "ROOT %after = STATE tuple(%up, %z, LAST)",
)  # fmt: skip
AROUND = (*START[:-1], "%outer = STATE while(%state), condition=%until, body=%around")


def around(first="%zero", last="%m", inner=LOOP):
    """An outer loop: what the counter of the inner one starts at, and the next bound."""
    lines = [line.replace("FIRST", first).replace("LAST", last) for line in OUTER]
    lines = [inner if line == LOOP else line for line in lines]
    return [computation("%around", *lines), computation("%until", *ENTER, *BELOW_7)]


@pytest.mark.parametrize(("first", "last", "count"), [
    # A bound that the outer loop carries too, one that changes, and a counter that goes on.
    ("%zero", "%m", 10), ("%zero", "%end", 10), ("%zero", "%up", None), ("%j", "%m", None),
])  # fmt: skip
def test_a_loop_in_a_loop_has_a_bound_that_no_iteration_of_the_outer_one_changes(
    first, last, count
):
    others = around(first, last)
    assert times(BELOW_N, start=AROUND, others=others, within="around") == count


def test_a_loop_in_a_called_computation_has_the_arguments_of_its_call():
    inner = computation("%inner", "%state = STATE parameter(0)", "ROOT " + LOOP)
    call = "%loop = STATE call(%state), to_apply=%inner"
    assert times(BELOW_N, start=(*START[:-1], call), others=[inner], within="inner") == 10
    for last, count in (("%end", 10), ("%up", None)):
        others = [inner, *around(last=last, inner=call)]
        assert times(BELOW_N, start=AROUND, others=others, within="inner") == count


def test_of_a_body_that_two_loops_run_a_loop_in_it_has_no_known_bound():
    twice = (*AROUND, "%again = STATE while(%outer), condition=%until, body=%around")
    assert times(BELOW_N, start=twice, others=around(), within="around") is None
