"""report.html: one page that needs no network and shows what the run was."""

from html.parser import HTMLParser

import pytest
from commands.small_runs import read_lines, small_once, strop


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_once(tmp_path_factory)


_VOID = {"meta", "br", "hr", "img", "link", "input", "circle", "polyline"}


class Page(HTMLParser):
    """Collects the text and everything that a browser would fetch, and checks that tags nest."""

    def __init__(self, path):
        super().__init__()
        self.open, self.fetched, self.scripts, self.words, self.curves = [], [], 0, [], 0
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag, attributes):
        self.scripts += tag == "script"
        self.curves += tag == "polyline"
        self.fetched += [value for name, value in attributes if name in ("src", "href", "srcset", "action", "data")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.curves += tag == "polyline"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, text):
        self.words.append(text)


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "a<b>&c"
    assert strop("train", small.train, *small.eval_flags, "--run.folder", folder).code == 0
    return folder


def test_the_report_parses_and_fetches_nothing(run):
    page = Page(run / "report.html")
    assert page.fetched == []
    assert page.scripts == 0
    assert "url(" not in (run / "report.html").read_text()


def test_the_report_shows_the_objective_and_a_curve_for_every_metric(run):
    page = Page(run / "report.html")
    text = "".join(page.words)
    assert (run / "objective.txt").read_text().strip() in text
    names = {name for row in read_lines(run / "metrics.jsonl") for name in row} - {"step"}
    names = {name for name in names if not name.endswith(("_reward_low", "_reward_high"))}
    assert [name for name in names if name not in page.words] == []
    assert page.curves == len(names)


def test_the_curve_of_an_evaluation_begins_at_step_0_and_has_its_interval_around_it(run):
    """The text below a curve is its steps, and its range, to which the interval counts."""
    words = Page(run / "report.html").words
    (start, *_, end) = read_lines(run / "metrics.jsonl")
    place = words.index("eval/sampled_reward")
    shown = [word for word in words[place + 1 :] if word.strip()][:3]
    low, high = (side([row[f"eval/sampled_reward_{name}"] for row in (start, end)]) for side, name in _ENDS)
    assert shown[0] == f"{start['eval/sampled_reward']:.4g} \u2192 {end['eval/sampled_reward']:.4g}"
    assert shown[1:] == ["steps 0\u20133", f"{low:.4g} \u2026 {high:.4g}"]
    assert (run / "report.html").read_text().count("<polygon") == 2  # greedy and sampled


_ENDS = ((min, "low"), (max, "high"))


def test_the_report_shows_samples_of_the_last_step(run):
    text = "".join(Page(run / "report.html").words)
    assert "Samples of step 000003" in text
    for row in read_lines(run / "rollouts/step_000003.jsonl")[:12]:
        assert row["prompt"] in text
        assert row["response"] in text


def test_names_that_are_markup_are_shown_as_text(run):
    page = Page(run / "report.html")
    assert page.words.count("a<b>&c") == 2  # title and heading


def test_prompts_and_labels_that_are_markup_are_shown_as_text(small, tmp_path):
    path = tmp_path / "markup.jsonl"
    path.write_text('{"prompt": "a=", "label": "<script src=http://x>"}\n')
    flags = ("--data.path", path, "--num-steps", "1", "--run.folder", tmp_path / "run")
    assert strop("train", small.train, *flags).code == 0
    page = Page(tmp_path / "run/report.html")
    assert (page.scripts, page.fetched) == (0, [])
    assert "<script src=http://x>" in page.words


def test_a_report_of_sft_has_its_curves_and_no_samples(small, tmp_path):
    assert strop("sft", small.sft, "--run.folder", tmp_path / "run").code == 0
    page = Page(tmp_path / "run/report.html")
    assert page.fetched == []
    assert "nll" in page.words
    assert "Samples" not in "".join(page.words)


def test_a_run_that_stopped_before_its_first_step_has_a_report_too(small, tmp_path):
    flags = ("--guards.max_logprob_gap", "1e-12", "--run.folder", tmp_path / "run")
    assert strop("train", small.train, *flags).code == 1
    assert "objective: ppo_clip" in "".join(Page(tmp_path / "run/report.html").words)
