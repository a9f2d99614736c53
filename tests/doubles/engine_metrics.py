"""Metrics of engines in Prometheus' text format, as far as they are used."""

from __future__ import annotations

from tests.doubles.double_machine import DoubleMachine

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def vllm_metrics(machine: DoubleMachine) -> str:
    scheduler, cache = machine.scheduler, machine.scheduler.cache
    labels = f'engine="0",model_name="{machine.name}"'
    return _text(
        [
            ("vllm:num_requests_running", "gauge", labels, len(scheduler.running)),
            ("vllm:num_requests_waiting", "gauge", labels, len(scheduler.waiting)),
            ("vllm:kv_cache_usage_perc", "gauge", labels, cache.usage),
            ("vllm:prefix_cache_queries_total", "counter", labels, cache.n_queries),
            ("vllm:prefix_cache_hits_total", "counter", labels, cache.n_hits),
            ("vllm:num_preemptions_total", "counter", labels, 0),
            ("vllm:prompt_tokens_total", "counter", labels, scheduler.n_prompt_tokens),
            ("vllm:prompt_tokens_cached_total", "counter", labels, cache.n_hits),
            ("vllm:generation_tokens_total", "counter", labels, scheduler.n_tokens),
            *(
                (
                    "vllm:request_success_total",
                    "counter",
                    f'engine="0",finished_reason="{reason}",model_name="{machine.name}"',
                    scheduler.finished[reason],
                )
                for reason in ("stop", "length", "abort", "error", "repetition")
            ),
            (
                "vllm:admission_rejections_total",
                "counter",
                f'model_name="{machine.name}",reason="max_num_queued_reqs"',
                scheduler.n_rejected,
            ),
            *_own(machine),
        ]
    )


def sglang_metrics(machine: DoubleMachine) -> str:
    scheduler, cache = machine.scheduler, machine.scheduler.cache
    labels = f'model_name="{machine.name}"'
    return _text(
        [
            ("sglang:num_running_reqs", "gauge", labels, len(scheduler.running)),
            ("sglang:num_queue_reqs", "gauge", labels, len(scheduler.waiting)),
            ("sglang:token_usage", "gauge", labels, cache.usage),
            ("sglang:cache_hit_rate", "gauge", labels, cache.n_hits / cache.n_queries if cache.n_queries else 0.0),
            ("sglang:prompt_tokens_total", "counter", labels, scheduler.n_prompt_tokens),
            ("sglang:generation_tokens_total", "counter", labels, scheduler.n_tokens),
            *_own(machine),
        ]
    )


def _own(machine: DoubleMachine) -> list[tuple[str, str, str, float]]:
    """Return the metrics that only the double has."""
    labels = f'model_name="{machine.name}"'
    return [
        ("double:requests_started_total", "counter", labels, machine.scheduler.n_started),
        ("double:requests_cancelled_total", "counter", labels, machine.scheduler.n_cancelled),
        *(
            ("double:faults_total", "counter", f'{labels},fault="{fault}"', n)
            for fault, n in sorted(machine.faults.n_struck.items())
        ),
    ]


def _text(samples: list[tuple[str, str, str, float]]) -> str:
    lines: list[str] = []
    for name, kind, labels, value in samples:
        head = f"# TYPE {name} {kind}"
        if head not in lines:
            lines.append(head)
        lines.append(f"{name}{{{labels}}} {float(value)}")
    return "\n".join(lines) + "\n"
