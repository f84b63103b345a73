"""``unsilent coverage WORKLOAD``: one verb for two kinds of campaigns, one of trainings and one of inference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from unsilent.campaigns.kinds import Kind
from unsilent.cli.campaign import Verb
from unsilent.errors import UsageError
from unsilent.options import OptionField, OptionValues, options_of
from unsilent.report.text import count_text
from unsilent.studies.coverage.inference.kind import INFERENCE_COVERAGE
from unsilent.studies.coverage.inference.spec import InferenceCoverageOptions
from unsilent.studies.coverage.spec import CoverageAnalysisOptions, CoverageBudget
from unsilent.workloads.task import INFERENCE, TRAINING, find_task

ABOUT = """Measure which detectors find which faults of a training or of an inference, and their false alarms.

Of a training: records the signals of faulty steps of each class of severity, and applies every rule of a monitor to them. Of
inference: draws faults that change an answer, and lets all detectors judge the same faulty run. Reports detection at equal false
alarms, latency, repair and cost, in tables and an HTML report. Resumable: the same command continues where it stopped.
"""
NOUNS = {TRAINING: "a training", INFERENCE: "a workload of inference"}


class TrainingCoverageVerb(Verb):
    """Of a training: the recording of the golden run, and fault-free runs."""

    def dry_run_notes(self, asked: OptionValues) -> Iterator[str]:
        runs = asked["clean_runs"] + 3 * asked["changed_runs"]
        yield f"after the trials, up to {count_text(runs, 'fault-free run')} would run, unless stored already"
        yield "the time estimate does not include fault-free runs; a trial draws faults until one is of its class"

    def run(self, asked: OptionValues, spec: Any, store: Any) -> Any:
        from unsilent.studies.coverage.study import run_coverage

        with self.open_executor_and_display(asked, spec) as (executor, observer):
            return run_coverage(
                spec, asked.make_dataclass(CoverageBudget), executor, store, asked.make_dataclass(CoverageAnalysisOptions),
                observer=observer, command=self.command_line(asked),
            )  # fmt: skip


class InferenceCoverageVerb(Verb):
    """Of inference: clean samples."""

    def check(self, asked: OptionValues, spec: Any) -> None:
        from unsilent.studies.coverage.inference.scoring import check_clean_samples

        super().check(asked, spec)
        check_clean_samples(spec.clean_samples, asked["rate"])

    def dry_run_notes(self, asked: OptionValues) -> Iterator[str]:
        samples = count_text(3 * asked["clean_samples"], "clean sample")
        yield f"before the trials, {samples} would be judged, unless stored already"
        yield f"the time estimate is of trials that draw {asked['tries']:,} faults; most trials draw far fewer"

    def run(self, asked: OptionValues, spec: Any, store: Any) -> Any:
        from unsilent.studies.coverage.inference.study import run_inference_coverage

        options = asked.make_dataclass(InferenceCoverageOptions)
        with self.open_executor_and_display(asked, spec) as (executor, observer):
            return run_inference_coverage(
                spec, self.budget(asked), executor, store, options, observer=observer, command=self.command_line(asked)
            )


class CoverageVerb(Verb):
    """``unsilent coverage``: hands on to the verb of the workload's task."""

    def __init__(self, kind: Kind[Any, Any, Any]) -> None:
        super().__init__(kind)
        self._verbs: dict[str, Verb] = {
            TRAINING: TrainingCoverageVerb(kind), INFERENCE: InferenceCoverageVerb(INFERENCE_COVERAGE)
        }  # fmt: skip
        self._fields = {task: options_of(*verb.options) for task, verb in self._verbs.items()}
        self.options = tuple(dict.fromkeys(cls for verb in self._verbs.values() for cls in verb.options))

    @property
    def about(self) -> str:
        return ABOUT

    @property
    def option_fields(self) -> Mapping[str, OptionField]:
        """Of both, with what differs between them in the help."""
        one, other = (self._fields[task] for task in (TRAINING, INFERENCE))
        merged = {}
        for name, asking in {**other, **one, "workload": other["workload"]}.items():
            option = asking.option
            if name not in one or name not in other:
                task = TRAINING if name in one else INFERENCE
                option = replace(option, help=f"{option.help} Only for {task}.")
            elif one[name].default_text != other[name].default_text:
                texts = f"{one[name].default_text}; for inference {other[name].default_text}"
                option = replace(
                    option, help=f"{option.help} For inference: {other[name].option.help}", default_text=texts
                )
            merged[name] = replace(asking, option=option)
        return {name: merged[name] for name in (*one, *(name for name in other if name not in one))}

    def main(self, asked: OptionValues) -> int:
        task = self._task(asked)
        own = OptionValues(self._verbs[task].options)
        wrong = [name for name in asked.given_values if name not in own.options]
        asked.reject_if_given(wrong, f"{asked['workload']} is {NOUNS[task]}, which these options are not for")
        own.given_values = dict(asked.given_values)
        return self._verbs[task].main(own)

    def _task(self, asked: OptionValues) -> str:
        """Told by options that one of both has alone, else by the workload."""
        if "workload" not in asked.given_values:
            raise UsageError(self._fields[INFERENCE]["workload"].option.missing_error)
        given = {
            task: any(name not in self._fields[other] for name in asked.given_values)
            for task, other in ((TRAINING, INFERENCE), (INFERENCE, TRAINING))
        }
        is_own = ":" in asked["workload"] and not asked["workload"].startswith("hf:")
        if is_own and given[TRAINING] != given[INFERENCE]:
            return TRAINING if given[TRAINING] else INFERENCE
        weights = asked["weights"]
        found = find_task(asked["workload"], dict(asked["options"]), data=asked["data"], weights=weights)
        return found or TRAINING
