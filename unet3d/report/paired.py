"""A paired test between two cross-validations of the same cases: Wilcoxon's signed-rank test, by SciPy."""

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import fmean, median
from typing import NamedTuple

from unet3d.base.types import Table
from unet3d.report.case_scores import METRICS, shown
from unet3d.report.compared_runs import ComparedRun
from unet3d.report.folds import MEAN_OF_CLASSES, scores_by_case

TESTED = ("dice", "hd95_mm")  # IoU ranks the cases as Dice does
HEADS = (
    *("score", "class", "pairs", "that differ", "first", "second", "mean difference", "median difference"),
    *("W+", "p", "effect"),
)
NOTE = (
    "Wilcoxon signed-rank test of second minus first, two-sided (scipy.stats.wilcoxon): pairs are out-of-fold cases "
    "that both methods have scored; pairs without a difference are left out of ranks. W+: the sum of ranks in favour "
    "of higher values of the second. Effect: matched-pairs rank-biserial correlation, 1 where the second is higher in "
    "each pair that differs, -1 where it is lower. p is not corrected for the number of rows. Cases of one fold share "
    "a network, so that the test is of these trainings, not of others."
)


class PairedTest(NamedTuple):
    """The difference of two methods in one score of one class, second minus first."""

    metric: str
    name: str  # of the class; MEAN for the mean of classes
    pairs: int
    differing: int
    first: float  # mean over the pairs
    second: float
    mean_difference: float
    median_difference: float
    rank_sum: float | None = None  # of positive differences; None where no pair differs
    p: float | None = None
    effect: float | None = None


def paired_tests(first: ComparedRun, second: ComparedRun) -> list[PairedTest]:
    """Return a test of each score and class that both methods have, of cases that both have scored."""
    tests = []
    for metric in TESTED:
        of_first = scores_by_case(first, metric)
        of_second = scores_by_case(second, metric)
        for name in of_first:
            if name in of_second:
                test = _test(metric, name, of_first[name], of_second[name])
                tests += [test] if test is not None else []
    return tests


def _test(metric: str, name: str, first: Mapping[str, float], second: Mapping[str, float]) -> PairedTest | None:
    """Return the test of scores by case; None without a common case."""
    cases = sorted(first.keys() & second.keys())
    if not cases:
        return None
    before = [first[case] for case in cases]
    after = [second[case] for case in cases]
    differences = [new - old for old, new in zip(before, after, strict=True)]
    differing = [difference for difference in differences if difference]
    test = PairedTest(
        metric,
        name,
        pairs=len(cases),
        differing=len(differing),
        first=fmean(before),
        second=fmean(after),
        mean_difference=fmean(differences),
        median_difference=median(differences),
    )
    if not differing:
        return test
    return _ranked(test, differing)


def _ranked(test: PairedTest, differing: Sequence[float]) -> PairedTest:
    """Return the test with what follows from ranks of the differences, none of which is 0."""
    from scipy.stats import wilcoxon

    rank_sum = float(wilcoxon(differing, alternative="greater").statistic)
    p = float(wilcoxon(differing).pvalue)
    all_ranks = len(differing) * (len(differing) + 1) / 2
    return test._replace(rank_sum=rank_sum, p=p if isfinite(p) else None, effect=2 * rank_sum / all_ranks - 1)


def numbers(tests: Sequence[PairedTest]) -> list[list[object]]:
    """Return the tests as plain values below HEADS; None where no pair differs."""
    return [[test.metric, test.name or MEAN_OF_CLASSES, *test[2:]] for test in tests]


def table(tests: Sequence[PairedTest]) -> Table:
    """Return the tests as text."""
    rows = []
    for test in tests:
        values = (test.first, test.second, test.mean_difference, test.median_difference)
        row = [METRICS[test.metric][0], test.name or MEAN_OF_CLASSES, str(test.pairs), str(test.differing)]
        row += [shown(test.metric, value) for value in values]
        row.append("" if test.rank_sum is None else f"{test.rank_sum:g}")
        row.append("" if test.p is None else f"{test.p:.2g}")
        row.append("" if test.effect is None else f"{test.effect:.2f}")
        rows.append(row)
    return Table(list(HEADS), rows)
