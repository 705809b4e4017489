"""The evidence pages' tables and sentences follow from the results."""

import re
from functools import partial
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "examples" / "evidence"
# What pages tell beside the declared comparisons, by grid.
BESIDE = {
    "gpu": [(f"{loss}, {batch}", f"clip, {batch}") for batch in (256, 1024) for loss in ("queue", "neuclip")],
    "positives": [("queue", "clip")],
}


def table(page: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading of a page."""
    section = (ROOT / "docs" / page).read_text().split(f"{heading}\n", 1)[1]
    rows = re.split(r"^\|[-|]+\|$", section, maxsplit=1, flags=re.MULTILINE)[1].lstrip("\n").split("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]


def main_runs(grid, report) -> tuple:
    declared, results = grid.Grid(EVIDENCE / "grid.yaml"), grid.read_results(EVIDENCE / "results.jsonl").values()
    return declared, report.by_method(list(results), declared, "main")


def test_the_pages_differences_follow_from_the_results(evidence):
    grid, _, report = evidence
    rows = report.goals(*main_runs(grid, report)).replace(", 5 seeds", "").splitlines()
    told = [row for row in rows if "±" in row]
    assert [f"| {' | '.join(row)} |" for row in table("evidence/icons.md", "## Differences")] == told


def test_the_pages_scores_follow_from_the_results(evidence):
    """R@1, zero-shot accuracy, both by seed, and tau."""
    grid, _, report = evidence
    _, runs = main_runs(grid, report)
    methods = ("clip", "neuclip", "fastclip-v3", report.BY_RULE, "minibatch", "queue, unified", "cyclip")
    rows = table("evidence/icons.md", "# Icons: each method with its tuned flags")
    for method, (_, flags, recall, zero_shot, by_seed, tau, _) in zip(methods, rows, strict=True):
        seeds = [runs[method][seed] for seed in sorted(runs[method])]
        assert set(seeds[0]["candidate"].split()) <= set(flags.strip("`").split())
        values = [[value(run) for run in seeds] for value in (report.last_recall, report.concepts)]
        assert [recall, zero_shot] == [f"{mean(each):.1f}" for each in values], method
        assert by_seed == "; ".join(", ".join(f"{one:.1f}" for one in each) for each in values), method
        assert tau == f"{mean(run['tau'] for run in seeds):.3f}", method


def test_the_batch_sizes_scores_follow_from_the_results(evidence):
    grid, _, report = evidence
    _, runs = main_runs(grid, report)
    methods = ("clip", "clip, batch 128", "clip, batch 256", "neuclip", "queue, unified", "neuclip, batch 128")
    for method, row in zip(methods, table("evidence/batch-size.md", "# Icons: batch size"), strict=True):
        seeds = range(5 if "seeds 0 to 4" in row[0] else 2)
        for text, value in ((row[3], report.last_recall), (row[5], report.concepts)):
            assert text == ", ".join(f"{value(runs[method][seed]):.1f}" for seed in seeds), method


def test_sentences_of_readme_and_results_follow_from_the_results(evidence):
    grid, _, report = evidence
    _, runs = main_runs(grid, report)
    readme, results = ((ROOT / page).read_text() for page in ("README.md", "docs/results.md"))
    pairs = ("neuclip", "clip"), ("queue, unified", "clip"), ("neuclip, batch 128", "clip, batch 256")
    for ours, theirs in pairs:
        value, half, n = report.paired(runs[ours], runs[theirs])
        assert n == 5 and all(f"{value:.1f} ± {half:.1f}" in page for page in (readme, results)), ours
    value, half, _ = report.paired(runs["clip, batch 256"], runs["clip"])
    assert f"{value:.1f} ± {half:.1f}" in results
    for ours, theirs in report.PAIRS:
        if len(runs[ours].keys() & runs[theirs].keys()) == 5 and "queue" not in ours and ours != "minibatch":
            told = [report.paired(runs[ours], runs[theirs], value) for value in (report.last_recall, report.concepts)]
            row = "; ".join(f"{value:+.1f} ± {half:.1f}" for value, half, _ in told)
            assert row in results or (ours, theirs) == (report.BY_RULE, "fastclip-v3"), (ours, theirs)


def test_what_the_pages_admit_follows_from_the_grid(evidence):
    """Runs that never ran, rows without a commit, compiled ones, the run that was given up, and the lead by length."""
    grid, _, report = evidence
    declared, runs = main_runs(grid, report)
    results = grid.read_results(EVIDENCE / "results.jsonl")
    missing = [run for run in declared.runs if run.name not in results]
    assert (len(missing), len(declared.runs)) == (61, 200) and len(results) == 139
    assert {run.method for run in missing} >= {"dcl", "queue, tau 0.03"}
    assert not any(one.get("commit") for one in results.values())
    assert sum(bool(one.get("compiled")) for one in results.values()) == 17
    torch = {method: [run["versions"]["torch"] for run in seeds.values()] for method, seeds in runs.items()}
    assert {*torch["clip"], *torch["neuclip"]} == {"2.15.0"}
    larger = ("clip, batch 128", "clip, batch 256", "neuclip, batch 128")
    assert {one for method in (report.BY_RULE, "cyclip", *larger) for one in torch[method]} == {"2.14.1"}
    mixed = ("fastclip-v3", "minibatch", "queue, unified")
    assert all(torch[method] == [*4 * ["2.15.0"], "2.14.1"] for method in mixed)
    half, short, long = (report.by_method(list(results.values()), declared, cell) for cell in ("half", "short", "long"))
    leads = [report.paired(short["neuclip"], half["clip"]), report.paired(runs["neuclip"], runs["clip"]),
             report.paired(long["neuclip"], long["clip"])]
    assert [(f"{value:.1f}", seeds) for value, _, seeds in leads] == [("0.6", 2), ("4.8", 5), ("7.0", 1)]
    given_up = runs["queue, compositional"][0]
    names = ("docs/evidence/icons.md", "docs/results.md")
    pages = [" ".join((ROOT / name).read_text().split()) for name in names]
    assert f"seed 0: {report.last_recall(given_up):.1f}; {report.concepts(given_up):.1f}" in pages[0]
    assert "its lead is 0.6, 4.8 and 7.0 after 4, 8 and 16" in pages[0] and "61 of 200 runs never ran" in pages[0]
    for cell, method, start in (
        (short, "sogclr", "two seeds, R@1: "), (short, "isogclr, rho 2.5", "R@1: -1.2; "),
        (runs, "cyclip", "rate, two seeds: "), (short, "amorlip", "not tuned, two seeds: "),
        (short, "amorlip, paper", "with rho 6.5: "),
    ):  # fmt: skip
        found = [report.paired(cell[method], cell["clip"], value) for value in (report.last_recall, report.concepts)]
        assert all((half, seeds) == (None, 2) for _, half, seeds in found)
        told = f"{start}{found[0][0]:+.1f}" + (f"; {found[1][0]:+.1f}" if "R@1" not in start else "")
        assert f"{told} | direction" in pages[1] or f"{told}; " in pages[1], method
    methods = ("clip, accum 4", "clip", "neuclip")
    recalls = [mean(report.last_recall(short[method][seed]) for seed in (0, 1)) for method in methods]
    assert "R@1 {:.1f}, where `clip` has {:.1f} at 32 and `neuclip` {:.1f} (two seeds)".format(*recalls) in pages[1]
    seconds = [short[method][1]["cpu_seconds"] for method in methods]
    assert [f"{time / seconds[1]:.1f}" for time in seconds] == ["1.1", "1.0", "1.4"]


def test_the_smaller_grids_tables_follow_from_the_results(evidence):
    grid, _, report = evidence
    declared = grid.Grid(EVIDENCE / "small.yaml")
    results = list(grid.read_results(EVIDENCE / "small.jsonl").values())
    page = (ROOT / "docs/evidence/small.md").read_text()
    assert {one["commit"] for one in results} == {results[0]["commit"]} and not any(one["compiled"] for one in results)
    for text in (report.scores(declared, results), report.declared(declared, results)):
        assert text.strip() in page
    hours = sum(one["cpu_seconds"] or 0 for one in results) / 3600
    assert f"declares {len(declared.runs)} runs; {len(results)} ran, in {hours:.1f} hours" in page
    runs = report.by_method(results, declared, "replication")
    told = " ".join((ROOT / "docs/results.md").read_text().split())
    for other in ("cyclip", "fastclip-v3", "amorlip", "neuclip", "dcl", "clip"):
        both = (runs["queue, consistency"], runs[other])
        of_both = ([report.last_recall(one[seed]) for seed in sorted(one)] for one in both)
        value, half, _ = report.tested(*of_both, other != "clip")
        assert f"{value:.1f} ± {half:.1f}" in told.partition("eight fresh seeds")[2], other
    runs = report.by_method(results, declared, "isolation")
    value, half, seeds = report.paired(runs["queue, tau 0.03"], runs["control, tau 0.03"])
    assert seeds == 5 and f"{value:.1f} ± {half:.1f}" in (ROOT / "docs/results.md").read_text()
    runs = runs_by_rule = report.by_method(results, declared, "rules")
    clip, clip128 = "clip, seeded order", "clip, 128 by rule"
    names = ("evidence/small", "results", "neighbours")
    pages = {name: " ".join((ROOT / f"docs/{name}.md").read_text().split()) for name in names}
    pages["readme"] = " ".join((ROOT / "README.md").read_text().split())
    for ours, theirs, names in (
        ("queue", clip, ("evidence/small", "results", "readme")),
        ("queue, consistency", clip, ("evidence/small",)),
        ("neuclip, mixing", clip, ("evidence/small", "results", "readme")),
        ("queue, 128 by rule", clip128, ("evidence/small", "results", "readme")),
        ("neuclip, 128 by rule", clip128, ("evidence/small", "results", "readme")),
        (clip128, clip, ("evidence/small",)),
        ("queue, 128 by rule", "queue", ("evidence/small",)),
        ("neuclip, 128 by rule", "neuclip, mixing", ("evidence/small",)),
        ("fastclip-v3, gamma 1", clip, ("evidence/small",)),
        ("queue, consistency", "fastclip-v3, gamma 1", ("results",)),
        ("queue, consistency", "neuclip, mixing", ("results",)),
        ("queue", "xbm, later", ("evidence/small", "neighbours")),
        ("xbm, later", clip, ("evidence/small", "neighbours")),
    ):
        value, half, _ = report.paired(runs[ours], runs[theirs])
        assert all(f"{abs(value):.1f} ± {half:.1f}" in pages[name] for name in names), (ours, theirs, value, half)
    sets = [("isolation", "clip"), ("main", "clip"), ("replication", "clip"), ("rules", clip)]
    leads = []
    for cell, theirs in sets:
        runs = report.by_method(results, declared, cell)
        recalls = [mean(map(report.last_recall, runs[method].values())) for method in ("queue", theirs)]
        leads = sorted([*leads, recalls[0] - recalls[1]])
    assert f"by {leads[0]:.1f} to {leads[-1]:.1f} in four sets of seeds" in pages["results"]
    larger = report.by_method(results, declared, "batch")
    measures, told = (report.last_recall, report.concepts), []
    for loss in ("neuclip", "queue"):
        both = [larger[f"{one}, batch 128"].values() for one in (loss, "clip")]
        found = [report.tested(*(list(map(value, one)) for one in both), False) for value in measures]
        told.append("; ".join(f"{value:+.1f} ± {half:.1f}" for value, half, _ in found))
        assert all(told[-1].split(";")[0] in pages[name] for name in ("evidence/small", "readme"))
    assert f"at 128, the first declared: {told[0]}; `queue` {told[1]}" in pages["results"]
    found = [report.paired(runs_by_rule["fastclip-v3, gamma 1"], runs_by_rule[clip], value) for value in measures]
    told = "; ".join(f"{value:+.1f} ± {half:.1f}" for value, half, _ in found)
    assert f"gamma 1 by the rule, rho 2.5: {told} |" in pages["results"]
    at32 = list(map(report.last_recall, report.by_method(results, declared, "main")["clip"].values()))
    for batch, pages in ((256, ("README.md", "docs/results.md", "docs/settings.md")), (128, ("docs/results.md",))):
        at_larger = list(map(report.last_recall, larger[f"clip, batch {batch}"].values()))
        value, half, _ = report.tested(at32, at_larger, False)
        for name in (*pages, "docs/evidence/small.md"):
            assert f"{value:.1f} ± {half:.1f}" in (ROOT / name).read_text(), (batch, name)


def later(evidence, name: str) -> tuple:
    """A grid whose page has all its tables, the results, and the page."""
    grid, _, report = evidence
    declared = grid.Grid(EVIDENCE / f"{name}.yaml")
    results = grid.read_results(EVIDENCE / f"{name}.jsonl")
    return declared, results, report, (ROOT / f"docs/evidence/{name}.md").read_text()


def not_declared(declared, results, report, name: str) -> str:
    """The differences `BESIDE` the declared ones, in R@1, R@5 and R@10."""
    runs = report.by_method(list(results.values()), declared, name)
    told = [
        report.paired(runs[ours], runs[theirs], partial(report.last_recall, k=k))
        for ours, theirs in BESIDE.get(name, [])
        for k in (1, 5, 10)
    ]
    return ", ".join(f"{value:+.1f} ± {half:.1f}" for value, half, _ in told)


@pytest.mark.parametrize("name", ["components", "defaults", "glyphs", "gpu", "positives", "towers"])
def test_the_later_grids_tables_follow_from_the_results(evidence, name):
    declared, results, report, page = later(evidence, name)
    rows = list(results.values())
    assert {one["commit"] for one in rows} == {rows[0]["commit"]} and not any(one["compiled"] for one in rows)
    tables = report.scores(declared, rows) + report.declared(declared, rows)
    for text in tables.strip().split("\n\n"):
        assert text in page
    sentences = " ".join(line.strip() for line in page.splitlines() if not line.startswith("|"))
    known = tables + not_declared(declared, results, report, name)
    assert all(told in known for told in re.findall(r"\d+\.\d ± \d+\.\d", sentences))
    hours = sum(one["cpu_seconds"] for one in rows) / 3600
    assert f"{len(rows)} of {len(declared.runs)} declared runs ran, in {hours:.1f} hours" in " ".join(page.split())


@pytest.mark.parametrize(
    "name, page, start, end, count",
    [
        ("positives", "neighbours.md", "## Several positives", "\n## ", 2),
        ("gpu", "results.md", "| 256 pairs or more |", "\n", 8),
        ("gpu", "../README.md", "docs/evidence/gpu.md", "\n", 2),
        ("positives", "../README.md", "docs/evidence/positives.md", "\n", 2),
        ("positives", "results.md", "evidence/positives.md", " (not", 2),
        ("defaults", "results.md", "[no flag](evidence/defaults.md)", "\n", 4),
        ("defaults", "results.md", "7,706 icons, no flag", "\n", 2),
        ("defaults", "../README.md", "](docs/evidence/defaults.md)", "\n", 2),
    ],
)
def test_what_other_pages_say_of_a_later_grid_follows_from_its_results(evidence, name, page, start, end, count):
    declared, results, report, _ = later(evidence, name)
    tables = report.declared(declared, list(results.values())) + not_declared(declared, results, report, name)
    told = (ROOT / "docs" / page).read_text().partition(start)[2].partition(end)[0]
    differences = re.findall(r"-?\d\.\d ± \d\.\d", " ".join(told.split()))
    assert len(differences) == count and all(one in tables for one in differences)


def test_what_is_said_of_glyphs_follows_from_the_results(evidence):
    """The leads that do not repeat, in README, results.md and the page."""
    declared, results, report, page = later(evidence, "glyphs")
    first, fresh = (report.by_method(list(results.values()), declared, cell) for cell in ("glyphs", "fresh"))
    five = {method: {seed: seeds[seed] for seed in range(40, 45)} for method, seeds in first.items()}
    pages = {"page": " ".join(page.split())}
    for name in ("README.md", "docs/results.md"):
        pages[name] = " ".join((ROOT / name).read_text().split()).partition("evidence/glyphs.md)")[2].partition(" [")[0]
    everywhere, terms = ("page", "README.md", "docs/results.md"), "queue, consistency"
    for runs, ours, theirs, names in (
        (first, "queue", "clip", everywhere),
        (five, "neuclip", "clip", everywhere),
        (five, "queue", "clip", ("page", "docs/results.md")),
        (first, terms, "cyclip", ("page", "docs/results.md")),
        (first, terms, "clip", ("page", "docs/results.md")),
        (first, terms, "dcl", ("docs/results.md",)),
        (first, terms, "control", ("page",)),
        (first, terms, "queue", ("page",)),
        (fresh, "control", "clip", ("page",)),
    ):
        value, half, _ = report.paired(runs[ours], runs[theirs])
        assert all(f"{abs(value):.1f} ± {half:.1f}" in pages[name] for name in names), (ours, theirs, value, half)
    leads = report.by_seed(first["control"], first["clip"], report.last_recall)
    assert f"{mean(leads):.1f} in eight seeds, with each of them" in pages["page"] and min(leads) > 0
    later_seeds = report.by_seed(first["queue"], first["clip"], report.last_recall)[5:]
    assert f"a mean of {mean(later_seeds):.1f}, and all eight" in pages["page"]
    tables = report.declared(declared, list(results.values())).splitlines()
    eight = [row for row in tables if "8, paired" in row]
    assert len(eight) == 11 and min(float(p) for row in eight for p in re.findall(r"p (\S+)", row)) > 0.05


def test_what_the_page_of_components_says_beside_its_tables(evidence):
    """The starts of the fine-tuning, and by rate what it learns on the validation gallery and keeps."""
    declared, results, report, page = later(evidence, "components")
    runs = report.by_method(list(results.values()), declared, "fine-tuned")["full"]
    first = [results[f"scratch-clip-lr-1e-3-s{seed}"] for seed in runs]
    start = [mean(report.recall(run["by_epoch"][0], k=10) for run in runs.values()), mean(map(report.concepts, first)),
             mean(report.last_recall(run, k=10) for run in first)]  # fmt: skip
    assert "The models before have {:.1f}, {:.1f} and {:.1f}".format(*start) in " ".join(page.split())
    scratch = report.by_method(list(results.values()), declared, "scratch")
    seconds = {method: mean(run["cpu_seconds"] for run in runs.values()) for method, runs in scratch.items()}
    ratios = [seconds[f"{method}, token head"] / seconds[method] for method in ("clip", "queue")]
    assert "takes {:.1f} and {:.1f} times the CPU time".format(*ratios) in page
    for method in ("full", "lora"):
        for rate in declared.methods[method]["candidates"]:
            tried = [results[run.name] for run in declared.tuning(method) if run.candidate == rate]
            new, old = (mean(map(report.MEASURES[name], tried)) for name in ("R@10, new", "R@10, old"))
            assert f"| {declared.label(method)} | `{rate}` | {new:.1f} | {old:.1f} |" in page


def test_what_the_page_of_towers_says_beside_its_tables(evidence):
    """Scores before, and what `clip` learns and forgets; with how many seeds others are below it."""
    declared, results, report, page = later(evidence, "towers")
    page, every = " ".join(page.split()), list(results.values())
    locked, tuned = (report.by_method(every, declared, cell) for cell in ("locked", "fine-tuned"))
    clip, first = tuned["clip, both"], locked["clip"].values()
    new, old = (report.MEASURES[f"R@10, {kind}"] for kind in ("new", "old"))
    untrained, pretrained = (mean(report.recall(run["by_epoch"][epoch], k=10) for run in first) for epoch in (0, -1))
    start = mean(report.recall(run["by_epoch"][0], k=10) for run in clip.values())
    assert f"R@10 is {untrained:.1f} before and {pretrained:.1f} after" in page
    assert f"The models before have {start:.1f} new and {pretrained:.1f} old" in page
    learned, forgotten = mean(map(new, clip.values())) - start, pretrained - mean(map(old, clip.values()))
    assert f"`clip` learns {learned:.1f} and forgets {forgotten:.1f}" in page
    for method, value, below in (("tuneclip", new, 5), ("tuneclip", old, 1), ("queue, both", new, 5)):
        assert sum(value(tuned[method][seed]) < value(clip[seed]) for seed in clip) == below
    assert sum(new(run) < report.recall(run["by_epoch"][0], k=10) for run in tuned["lora"].values()) == 4


def test_the_interpolations_table_follows_from_the_scores(evidence):
    import interpolate

    page = (ROOT / "docs/evidence/fine-tuning.md").read_text()
    curves = interpolate.read_curves(EVIDENCE / "interpolated.jsonl")
    *table, gcl, hgcl = interpolate.report(curves)
    assert len(table) == 8 and "\n".join(table) in page
    page = " ".join(page.split())
    for variant, told in (("recovery + GCL", "3.8 ± 0.7"), ("recovery + HGCL", "-0.8 ± 1.1")):
        kept = [curves[variant][seed][-1][1] - curves["clip"][seed][-1][1] for seed in range(3)]
        assert told in interpolate.shown(kept) and told in page
    assert "-0.0 ± 1.8 (p 0.953; by seed -0.3, +0.8, -0.6)" in gcl and "0.0 ± 1.8 (-0.3, +0.8 and -0.6 by seed)" in page
    assert "-8.8 ± 0.4 (p 0.000; by seed -8.7, -8.9, -8.6)" in hgcl
    assert "8.8 ± 0.4 below (-8.7, -8.9 and -8.6 by seed)" in page
