"""generate.py: write shardd.json, a Grafana dashboard with a panel for every metric.

Run here after metrics have changed; tests/e2e/test_metrics.py compares the result with /metrics.
"""
import json
import os

SELECT = '{device=~"$device"}'
MODEL = '{device=~"$device",model=~"$model"}'


def rate(name, select=MODEL):
    return f"rate({name}{select}[$__rate_interval])"


def quantile(q, name):
    return (f"histogram_quantile({q}, sum by (le, device, model) "
            f"(rate({name}_bucket{MODEL}[$__rate_interval])))")


PANELS = [  # title, unit, [(expression, legend)]
    ("Step", "none", [(f"shardd_step{MODEL}", "{{device}} {{model}}")]),
    ("Steps per second", "ops", [(rate("shardd_steps_total"), "{{device}} {{model}}"),
                                 (rate("shardd_skipped_steps_total"), "skipped {{model}}"),
                                 (rate("shardd_guard_skipped_steps_total"), "by its guard {{model}}")]),
    ("Stopped by a guard", "none", [(f"shardd_stopped{MODEL}", "{{device}} {{model}}")]),
    ("Longest wait now", "s", [(f"shardd_wait_seconds{SELECT}", "{{device}} {{kind}}"),
                               (f"shardd_step_age_seconds{MODEL}", "open step {{device}} {{model}}")]),
    ("Loss", "none", [(f"shardd_loss{MODEL}", "{{device}} {{model}}")]),
    ("Gradient norm", "none", [(f"shardd_grad_norm{MODEL}", "{{device}} {{model}}")]),
    ("Gradient norm by unit", "none", [
        (f"sqrt(sum by (model, unit) (shardd_unit_grad_norm{MODEL} ^ 2))", "{{model}} {{unit}}")]),
    ("Update to weight by unit", "none", [
        (f"sqrt(sum by (model, unit) (shardd_unit_update_norm{MODEL} ^ 2) / "
         f"sum by (model, unit) (shardd_unit_weight_norm{MODEL} ^ 2))", "{{model}} {{unit}}")]),
    ("Daemons", "none", [(f"shardd_up{SELECT}", "{{device}}"),
                         (f"shardd_build_info{SELECT}", "{{device}} {{version}} {{isa}}")]),
    ("Gradients per second", "ops", [(rate("shardd_returns_total"), "{{device}} {{model}}"),
                                     (rate("shardd_stale_returns_total"), "stale {{model}}")]),
    ("Gradient bytes per second", "Bps", [(rate("shardd_return_bytes_total"), "{{device}} {{model}}"),
                                          (rate("shardd_spilled_bytes_total"), "spilled {{device}}")]),
    ("Gradients that wait for their turn", "none", [(f"shardd_waiting_returns{MODEL}", "{{device}}")]),
    ("Memory", "bytes", [(f"shardd_memory_bytes{MODEL}", "{{device}} {{model}} {{kind}}"),
                         (f"shardd_memory_available_bytes{SELECT}", "left {{device}}"),
                         (f"shardd_pin_bytes{MODEL}", "{{device}} {{model}} pinned"),
                         (f"shardd_file_bytes{MODEL}", "{{device}} {{model}} {{kind}} on files")]),
    ("Quotas", "bytes", [(f"shardd_quota_bytes{SELECT}", "{{device}} {{who}}"),
                         (f"shardd_quota_limit_bytes{SELECT}", "{{device}} {{who}} may have")]),
    ("Steps that readers have pinned", "none", [(f"shardd_pins{MODEL}", "{{device}} {{model}}"),
                                                (f"shardd_pin_seconds{MODEL}", "oldest, s {{device}} {{model}}")]),
    ("Sessions", "none", [(f"shardd_sessions{SELECT}", "{{device}}"),
                          (rate("shardd_sessions_total", SELECT), "opened {{device}}"),
                          (rate("shardd_session_deaths_total", SELECT), "died {{device}}")]),
    ("Requests per second", "ops", [(rate("shardd_requests_total", SELECT), "{{device}}"),
                                    (rate("shardd_bad_frames_total", SELECT), "bad {{device}}"),
                                    (rate("shardd_dropped_events_total", SELECT), "log {{device}}")]),
    ("Recovery", "none", [(f"shardd_backup_leases_total{MODEL}", "backup leases {{device}}"),
                          (f"shardd_checkpoints_total{MODEL}", "checkpoints {{device}}"),
                          (f"shardd_checkpoint_failures_total{MODEL}", "failed {{device}}"),
                          (f"shardd_adopted_models_total{SELECT}", "adopted {{device}}")]),
    ("Verified gradients", "none", [(f"shardd_verify_compared_total{MODEL}", "compared {{device}} {{model}}"),
                                    (f"shardd_verify_differences_total{MODEL}", "differ {{device}} {{model}}"),
                                    (f"shardd_verify_missed_total{MODEL}", "missed {{device}} {{model}}"),
                                    (f"shardd_verify_worker_differences{MODEL}", "pid {{pid}} {{model}}")]),
    ("Age of the last checkpoint", "s", [(f"time() - shardd_checkpoint_time_seconds{MODEL}",
                                          "{{device}} {{model}}")]),
] + [
    (title, "s", [(quantile(q, name), f"p{round(q * 100)} {{{{device}}}} {{{{model}}}}")
                  for q in (0.5, 0.99)])
    for title, name in [
        ("Step time", "shardd_step_seconds"),
        ("Collecting a step's gradients", "shardd_collect_seconds"),
        ("Deciding", "shardd_decide_seconds"),
        ("Updating a unit", "shardd_apply_seconds"),
        ("From a gradient's arrival to its credit", "shardd_return_seconds"),
        ("Workers' waits for parameters", "shardd_fetch_wait_seconds"),
    ]
]


def panel(index, title, unit, targets):
    return {
        "id": index + 1, "type": "timeseries", "title": title,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"h": 8, "w": 8, "x": index % 3 * 8, "y": index // 3 * 8},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [{"refId": chr(ord("A") + i), "expr": expr, "legendFormat": legend}
                    for i, (expr, legend) in enumerate(targets)],
    }


def variable(name, query):
    return {"name": name, "type": "query", "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": query, "refresh": 2, "multi": True, "includeAll": True,
            "current": {"text": "All", "value": "$__all"}}


DASHBOARD = {
    "title": "shardd", "uid": "shardd", "schemaVersion": 38, "version": 1, "refresh": "10s",
    "time": {"from": "now-30m", "to": "now"},
    "templating": {"list": [
        {"name": "datasource", "type": "datasource", "query": "prometheus"},
        variable("device", "label_values(shardd_up, device)"),
        variable("model", "label_values(shardd_step, model)"),
    ]},
    "panels": [panel(i, *p) for i, p in enumerate(PANELS)],
}

if __name__ == "__main__":
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shardd.json")
    with open(path, "w", encoding="utf-8") as f:
        json.dump(DASHBOARD, f, indent=1)
        f.write("\n")
