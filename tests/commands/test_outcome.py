"""The last words of a run: each environment against itself, whatever was left out."""

from silva.commands.outcome import last_words


def row(environment, metric, mean, *, n=8, left_out=0, bounds=(None, None)):
    low, high = (None, None) if mean is None else (mean - 0.1, mean + 0.1)
    return {"environment": environment, "metric": metric, "mean": mean, "ci_low": low, "ci_high": high,
            "n": n, "left_out": left_out, "bound_low": bounds[0], "bound_high": bounds[1]}  # fmt: skip


def test_an_environment_that_failed_before_does_not_get_the_numbers_of_another():
    before = [row("a", "reward", None, n=0, left_out=8), row("b", "success", 0.25), row("b", "reward", 0.2)]
    after = [
        row("a", "success", 0.5), row("a", "reward", 0.5), row("b", "success", 0.75), row("b", "reward", 0.7)
    ]  # fmt: skip
    assert last_words(before, after) == [
        "held-out success, a: no result (8 episodes left out) before, 50.0% [40.0%, 60.0%] of 8 after",
        "held-out success, b: 25.0% [15.0%, 35.0%] of 8 before, 75.0% [65.0%, 85.0%] of 8 after",
    ]


def test_what_was_left_out_stands_beside_the_number_with_its_bounds():
    shares = row("a", "success", 0.5, n=2, left_out=6, bounds=(0.125, 0.875))
    after = [shares, row("a", "reward", 0.5, left_out=6)]
    assert last_words(after, after)[0].endswith(
        "50.0% [40.0%, 60.0%] of 2 (6 episodes left out: between 12.5% and 87.5% with them) after"
    )


def test_an_environment_without_success_shows_its_reward():
    before, after = [row("a", "reward", 0.5)], [row("a", "reward", 1.25, left_out=1)]
    assert last_words(before, after) == [
        "held-out reward, a: 0.500 [0.400, 0.600] of 8 before, "
        "1.250 [1.150, 1.350] of 8 (1 episodes left out) after"
    ]


def test_a_success_that_was_never_reported_before_is_not_made_up():
    after = [row("a", "success", 0.5), row("a", "reward", 0.5)]
    (line,) = last_words([row("a", "reward", 0.1)], after)
    assert line.startswith("held-out success, a: not reported before, 50.0%")
