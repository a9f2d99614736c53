"""Evaluation: problems played k times each, and what follows from the scores.

    problems ──submit──► batch `eval:NAME` ──ends──► scores of instances ──► avg@k, pass@k, intervals by data source
                                                           └── two of them ──► differences, and a paired test

The same evaluation submitted again is the same batch, so one that was interrupted goes on and plays nothing twice.
Instances are what is sampled: all means are over instances, and intervals come from drawing instances again.

A rollout that the farm broke has no score. It is counted by what broke it and named, never a zero: an instance's mean
is over its scored samples, and it is left out where it has none. pass@j is the estimate over the n samples that were
scored, and an instance with n < j is left out of it; both are counted in the report.
"""

from farm.evaluation.comparison import Comparison, compare
from farm.evaluation.evaluation_report import EvaluationReport, report_of
from farm.evaluation.evaluation_run import evaluate
from farm.evaluation.pass_at_k import pass_at_k

__all__ = ["Comparison", "EvaluationReport", "compare", "evaluate", "pass_at_k", "report_of"]
