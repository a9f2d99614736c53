"""The first tables, and the epoch of this store, by which a restored backup is detected

Revision: 0001
"""

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_LIVE = sa.text("finish_seq IS NULL")
_ENDED = sa.text("finish_seq IS NOT NULL")
_SCORED = sa.text("reward IS NOT NULL")
_ARCHIVED = sa.text("archive <> ''")
_OPEN = sa.text("ended_at IS NULL")


def upgrade() -> None:
    _batches()
    _rollouts()
    _played()
    _engines()
    _nodes()
    _borrowed_sandboxes()
    _steps()
    _archives()
    _observing()
    _access()
    _epochs()


def downgrade() -> None:
    for table in (
        *(
            "epochs",
            "secret_keys",
            "audit_log",
            "api_keys",
            "archive_parts",
            "archives",
            "collected_steps",
            "leaders",
            "nodes",
            "borrowed_sandboxes",
        ),
        *("named_weights", "engine_users", "engines"),
        *("annotations", "rewards", "segments", "call_experts", "artefacts", "model_calls", "attempts"),
        *("rollouts", "terminal_positions", "deliveries", "instances"),
        *("histograms", "measured_batches", "outbox", "batches"),
    ):
        op.drop_table(table)


def _batches() -> None:
    op.create_table(
        "batches",
        sa.Column("batch_id", sa.String(64), nullable=False),
        sa.Column("idempotency_key", sa.String(200), nullable=True),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("n_samples", sa.Integer(), nullable=False),
        sa.Column("n_rollouts", sa.Integer(), nullable=False),
        sa.Column("last_seq", sa.Integer(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("max_losses", sa.Integer(), nullable=False, server_default="10"),
        sa.Column("quarantine_after", sa.Integer(), nullable=False, server_default="6"),
        _text("run", sa.String(64)),
        _text("submitter", sa.String(64)),
        sa.Column("pinned", sa.Integer(), nullable=False, server_default=sa.text("0")),
        _text("pruned", sa.String(12)),
        sa.Column("pruned_at", sa.Double(), nullable=True),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("awaits_position", sa.String(64), nullable=True),
        sa.PrimaryKeyConstraint("batch_id", name=op.f("pk_batches")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_batches_idempotency_key")),
    )
    op.create_index("ix_batches_awaits_position", "batches", ["awaits_position"])
    op.create_table(
        "instances",
        sa.Column("batch_id", sa.String(64), nullable=False),
        sa.Column("group_index", sa.Integer(), nullable=False),
        sa.Column("data_source", sa.String(64), nullable=False),
        sa.Column("instance_id", sa.String(200), nullable=False),
        sa.Column("fields", sa.JSON(), nullable=False),
        _text("archive", sa.String(64)),
        sa.PrimaryKeyConstraint("batch_id", "group_index", name=op.f("pk_instances")),
        _of_batch("instances"),
    )
    op.create_index(
        "ix_instances_archive", "instances", ["archive"], sqlite_where=_ARCHIVED, postgresql_where=_ARCHIVED
    )
    op.create_table(
        "deliveries",
        sa.Column("batch_id", sa.String(64), nullable=False),
        sa.Column("consumer", sa.String(64), nullable=False),
        sa.Column("cursor", sa.Integer(), nullable=False),
        sa.Column("acknowledged_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("batch_id", "consumer", name=op.f("pk_deliveries")),
        _of_batch("deliveries"),
    )
    op.create_table(
        "terminal_positions",
        sa.Column("protocol", sa.String(64), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("batch_id", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("protocol", "position", name=op.f("pk_terminal_positions")),
        sa.UniqueConstraint("batch_id", name=op.f("uq_terminal_positions_batch_id")),
        _of_batch("terminal_positions"),
    )


def _rollouts() -> None:
    op.create_table(
        "rollouts",
        sa.Column("rollout_id", sa.String(64), nullable=False),
        sa.Column("batch_id", sa.String(64), nullable=False),
        sa.Column("group_index", sa.Integer(), nullable=False),
        sa.Column("sample_index", sa.Integer(), nullable=False),
        sa.Column("data_source", sa.String(64), nullable=False),
        sa.Column("instance_id", sa.String(200), nullable=False),
        sa.Column("stage", sa.String(8), nullable=False),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("n_failures", sa.Integer(), nullable=False),
        _count("n_lost"),
        sa.Column("node", sa.String(128), nullable=True),
        sa.Column("owner", sa.String(200), nullable=True),
        sa.Column("lease_expires_at", sa.Double(), nullable=True),
        sa.Column("queued_at", sa.Double(), nullable=False),
        sa.Column("ready_at", sa.Double(), nullable=False),
        sa.Column("resend_at", sa.Double(), nullable=False),
        sa.Column("n_sends", sa.Integer(), nullable=False),
        sa.Column("policy_outcome", sa.String(32), nullable=True),
        sa.Column("outcome", sa.String(32), nullable=True),
        sa.Column("submission", sa.JSON(), nullable=True),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("failure_kind", sa.String(32), nullable=True),
        sa.Column("failure_message", sa.Text(), nullable=True),
        sa.Column("n_turns", sa.Integer(), nullable=False),
        sa.Column("n_response_tokens", sa.Integer(), nullable=False),
        _count("n_invalid_actions"),
        _count("n_mismatches"),
        _count("n_segments"),
        _count("n_restarts"),
        sa.Column("version_min", sa.Integer(), nullable=True),
        sa.Column("version_max", sa.Integer(), nullable=True),
        sa.Column("submitted_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("finish_seq", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("rollout_id", name=op.f("pk_rollouts")),
        _of_batch("rollouts"),
        postgresql_with={"fillfactor": 70},
    )
    op.create_index("ix_rollouts_batch_id_group_index", "rollouts", ["batch_id", "group_index", "sample_index"])
    # partial, so that no planner uses it for those that are queued
    op.create_index(
        "ix_rollouts_batch_id_finish_seq",
        "rollouts",
        ["batch_id", "finish_seq"],
        sqlite_where=_ENDED,
        postgresql_where=_ENDED,
    )
    op.create_index(
        "ix_rollouts_live",
        "rollouts",
        ["node", "batch_id", "group_index", "sample_index"],
        sqlite_where=_LIVE,
        postgresql_where=_LIVE,
    )
    op.create_index(
        "ix_rollouts_scored",
        "rollouts",
        ["data_source", "instance_id"],
        sqlite_where=_SCORED,
        postgresql_where=_SCORED,
    )
    op.create_table(
        "attempts",
        sa.Column("rollout_id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("stage", sa.String(8), nullable=False),
        sa.Column("node", sa.String(128), nullable=False),
        sa.Column("worker", sa.String(200), nullable=False),
        sa.Column("queued_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("result", sa.String(32), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("rollout_id", "attempt", "stage", name=op.f("pk_attempts")),
        _of_rollout("attempts"),
    )


def _played() -> None:
    op.create_table(
        "model_calls",
        sa.Column("rollout_id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("call_index", sa.Integer(), nullable=False),
        sa.Column("messages", sa.JSON(), nullable=False),
        sa.Column("response", sa.JSON(), nullable=False),
        sa.Column("observations", sa.JSON(), nullable=False),
        sa.Column("finish_reason", sa.String(32), nullable=False),
        sa.Column("engine", sa.String(500), nullable=False),
        sa.Column("policy_version", sa.String(64), nullable=False),
        sa.Column("sampling", sa.JSON(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("latency_s", sa.Double(), nullable=False),
        sa.Column("n_prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("n_response_tokens", sa.Integer(), nullable=False),
        sa.Column("prefix_call", sa.Integer(), nullable=True),
        sa.Column("tools", sa.JSON(), nullable=True),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=True),
        sa.Column("response_ids", sa.LargeBinary(), nullable=True),
        sa.Column("response_logprobs", sa.LargeBinary(), nullable=True),
        sa.Column("versions", sa.JSON(), nullable=False, server_default=sa.text("'[]'")),
        sa.Column("stop_reason", sa.JSON(), nullable=True),
        sa.Column("n_cached_tokens", sa.Integer(), nullable=True),
        _count("n_invalid"),
        _text("begins", sa.Text()),
        sa.Column("mismatch", sa.Integer(), nullable=True),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("labels", sa.JSON(), nullable=False, server_default=sa.text("'{}'")),
        sa.Column("images", sa.JSON(none_as_null=True), nullable=True),
        sa.PrimaryKeyConstraint("rollout_id", "attempt", "call_index", name=op.f("pk_model_calls")),
        _of_rollout("model_calls"),
    )
    op.create_table(
        "artefacts",
        sa.Column("rollout_id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("media_type", sa.String(100), nullable=False),
        sa.Column("n_bytes", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("rollout_id", "attempt", "name", name=op.f("pk_artefacts")),
        _of_rollout("artefacts"),
    )
    op.create_table(
        "call_experts",
        sa.Column("rollout_id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("call_index", sa.Integer(), nullable=False),
        sa.Column("start", sa.Integer(), nullable=False),
        sa.Column("n_layers", sa.Integer(), nullable=False),
        sa.Column("top_k", sa.Integer(), nullable=False),
        sa.Column("ids", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("rollout_id", "attempt", "call_index", name=op.f("pk_call_experts")),
        _of_rollout("call_experts"),
    )
    op.create_table(
        "annotations",
        sa.Column("rollout_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("producer", sa.String(64), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("row", sa.Integer(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("tokens", sa.LargeBinary(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("rollout_id", "name", "producer", "step", "row", name=op.f("pk_annotations")),
        _of_rollout("annotations"),
    )
    op.create_table(
        "segments",
        sa.Column("rollout_id", sa.String(64), nullable=False),
        sa.Column("segment_index", sa.Integer(), nullable=False),
        sa.Column("batch_id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=False),
        sa.Column("response_ids", sa.LargeBinary(), nullable=False),
        sa.Column("response_mask", sa.LargeBinary(), nullable=False),
        sa.Column("response_logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("policy_versions", sa.LargeBinary(), nullable=False),
        sa.Column("mismatch", sa.Integer(), nullable=True),
        sa.Column("turn_rewards", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("expert_stretches", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("images", sa.JSON(none_as_null=True), nullable=True),
        sa.PrimaryKeyConstraint("rollout_id", "segment_index", name=op.f("pk_segments")),
        _of_rollout("segments"),
    )
    op.create_index("ix_segments_batch_id", "segments", ["batch_id"])
    op.create_table(
        "rewards",
        sa.Column("rollout_id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("rewards", sa.JSON(), server_default="{}", nullable=False),
        sa.Column("of_rows", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("evaluator", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("rollout_id", "attempt", name=op.f("pk_rewards")),
        _of_rollout("rewards"),
    )


def _engines() -> None:
    op.create_table(
        "engines",
        sa.Column("url", sa.String(500), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("key", sa.String(1000), nullable=False),
        _text("tokenizer", sa.String(500)),
        _text("tool_format", sa.String(32)),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("added_by", sa.String(128), nullable=False),
        _text("registrant", sa.String(64)),
        sa.Column("added_at", sa.Double(), nullable=False),
        sa.Column("info", sa.JSON(), nullable=False, server_default="{}"),
        _text("paused", sa.String(8)),
        _text("paused_by", sa.String(200)),
        sa.Column("paused_at", sa.Double(), nullable=True),
        _text("version", sa.String(64)),
        _count("version_order"),
        _count("n_orders"),
        _count("n_done"),
        _text("engine_paused", sa.String(8)),
        _text("engine_version", sa.String(64)),
        _text("failure", sa.String(1000)),
        _text("weights_path", sa.String(500)),
        sa.Column("held_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("url", name=op.f("pk_engines")),
    )
    op.create_table(
        "named_weights",
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("weights_path", sa.String(500), nullable=False),
        sa.Column("named_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("model", name=op.f("pk_named_weights")),
    )
    op.create_table(
        "engine_users",
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("uses", sa.JSON(), nullable=False),
        sa.Column("heartbeat_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("owner", name=op.f("pk_engine_users")),
    )


def _nodes() -> None:
    op.create_table(
        "nodes",
        sa.Column("node", sa.String(128), nullable=False),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("room", sa.Integer(), nullable=False),
        sa.Column("init_slots", sa.Integer(), nullable=False),
        sa.Column("run_slots", sa.Integer(), nullable=False),
        sa.Column("eval_slots", sa.Integer(), nullable=False),
        sa.Column("handlers", sa.JSON(), nullable=False),
        sa.Column("info", sa.JSON(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("heartbeat_at", sa.Double(), nullable=False),
        sa.Column("out_of_service_until", sa.Double(), nullable=True),
        _text("out_of_service_why", sa.Text()),
        _count("n_trips"),
        _text("instance", sa.String(64)),
        sa.PrimaryKeyConstraint("node", name=op.f("pk_nodes")),
    )
    op.create_table(
        "leaders",
        sa.Column("role", sa.String(32), nullable=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("role", name=op.f("pk_leaders")),
    )


def _borrowed_sandboxes() -> None:
    table = "borrowed_sandboxes"
    op.create_table(
        table,
        sa.Column("sandbox_id", sa.String(64), nullable=False),
        sa.Column("borrower", sa.String(64), nullable=False),
        sa.Column("name", sa.String(200), nullable=True),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("node", sa.String(128), nullable=True),
        _text("url", sa.String(500)),
        sa.Column("token", sa.String(64), nullable=False),
        sa.Column("lease_s", sa.Double(), nullable=False),
        sa.Column("lease_expires_at", sa.Double(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        _text("ended_why", sa.Text()),
        _count("finished"),
        sa.PrimaryKeyConstraint("sandbox_id", name=op.f("pk_borrowed_sandboxes")),
        postgresql_with={"fillfactor": 70},
    )
    of_open = {"sqlite_where": _OPEN, "postgresql_where": _OPEN}
    op.create_index("ix_borrowed_sandboxes_name", table, ["name", "created_at"])
    op.create_index("uq_borrowed_sandboxes_name", table, ["borrower", "name"], unique=True, **of_open)
    op.create_index("ix_borrowed_sandboxes_node", table, ["node"], **of_open)


def _steps() -> None:
    op.create_table(
        "collected_steps",
        sa.Column("run", sa.String(64), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("record", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("run", "step", name=op.f("pk_collected_steps")),
    )


def _access() -> None:
    op.create_table(
        "api_keys",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("max_open", sa.Integer(), nullable=True),
        sa.Column("max_engines", sa.Integer(), nullable=True),
        sa.Column("max_rate", sa.Double(), nullable=True),
        sa.Column("created_by", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("digest", name=op.f("uq_api_keys_digest")),
    )
    op.create_table(
        "audit_log",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("mark", sa.String(16), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("by", sa.String(64), nullable=False),
        sa.Column("verb", sa.String(32), nullable=False),
        sa.Column("target", sa.String(500), nullable=False),
        sa.Column("details", sa.String(500), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_audit_log")),
    )
    op.create_table(
        "secret_keys",
        sa.Column("role", sa.String(32), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("role", name=op.f("pk_secret_keys")),
    )
    op.create_index("ix_audit_log_mark", "audit_log", ["mark"])


def _observing() -> None:
    op.create_table(
        "histograms",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("label", sa.String(64), nullable=False),
        sa.Column("counts", sa.JSON(), nullable=False),
        sa.Column("total", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", "label", name=op.f("pk_histograms")),
    )
    op.create_table(
        "measured_batches",
        sa.Column("batch_id", sa.String(64), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("ended_seq", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("ended", sa.JSON(), server_default=sa.text("'[]'"), nullable=False),
        sa.PrimaryKeyConstraint("batch_id", name=op.f("pk_measured_batches")),
        _of_batch("measured_batches"),
    )
    op.create_table(
        "outbox",
        sa.Column("message_id", sa.String(64), nullable=False),
        sa.Column("form", sa.String(64), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("url", sa.String(2000), nullable=False),
        sa.Column("n_tries", sa.Integer(), nullable=False),
        sa.Column("error", sa.String(500), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("due_at", sa.Double(), nullable=False),
        sa.Column("abandoned_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("message_id", name=op.f("pk_outbox")),
    )
    op.create_index("ix_outbox_due_at", "outbox", ["due_at"])


def _archives() -> None:
    op.create_table(
        "archives",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("n_bytes", sa.BigInteger(), nullable=False),
        sa.Column("n_parts", sa.Integer(), nullable=False),
        sa.Column("uploaded_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_archives")),
    )
    op.create_table(
        "archive_parts",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("n_bytes", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.Column("uploaded_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("digest", "number", name=op.f("pk_archive_parts")),
    )


def _epochs() -> None:
    epochs = op.create_table(
        "epochs",
        sa.Column("role", sa.String(32), nullable=False),
        sa.Column("epoch", sa.String(64), nullable=False),
        sa.Column("counter", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("role", name=op.f("pk_epochs")),
    )
    op.bulk_insert(epochs, [{"role": "store", "epoch": secrets.token_hex(8), "counter": 0}])


def _count(name: str) -> sa.Column:
    return sa.Column(name, sa.Integer(), nullable=False, server_default=sa.text("0"))


def _text(name: str, kind: sa.types.TypeEngine) -> sa.Column:
    return sa.Column(name, kind, nullable=False, server_default=sa.text("''"))


def _of_batch(table: str) -> sa.ForeignKeyConstraint:
    name = op.f(f"fk_{table}_batches")
    return sa.ForeignKeyConstraint(["batch_id"], ["batches.batch_id"], name=name, ondelete="CASCADE")


def _of_rollout(table: str) -> sa.ForeignKeyConstraint:
    name = op.f(f"fk_{table}_rollouts")
    return sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.rollout_id"], name=name, ondelete="CASCADE")
