"""The first tables

Revision: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "batches",
        sa.Column("batch_id", sa.String(length=64), nullable=False),
        sa.Column("idempotency_key", sa.String(length=200), nullable=True),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("n_samples", sa.Integer(), nullable=False),
        sa.Column("n_rollouts", sa.Integer(), nullable=False),
        sa.Column("last_seq", sa.Integer(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("batch_id", name=op.f("pk_batches")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_batches_idempotency_key")),
    )
    op.create_table(
        "engines",
        sa.Column("url", sa.String(length=500), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("key", sa.String(length=500), nullable=False),
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("added_by", sa.String(length=128), nullable=False),
        sa.Column("added_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("url", name=op.f("pk_engines")),
    )
    op.create_table(
        "leaders",
        sa.Column("role", sa.String(length=32), nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("role", name=op.f("pk_leaders")),
    )
    op.create_table(
        "nodes",
        sa.Column("node", sa.String(length=128), nullable=False),
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("room", sa.Integer(), nullable=False),
        sa.Column("init_slots", sa.Integer(), nullable=False),
        sa.Column("run_slots", sa.Integer(), nullable=False),
        sa.Column("eval_slots", sa.Integer(), nullable=False),
        sa.Column("handlers", sa.JSON(), nullable=False),
        sa.Column("info", sa.JSON(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("heartbeat_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("node", name=op.f("pk_nodes")),
    )
    op.create_table(
        "instances",
        sa.Column("batch_id", sa.String(length=64), nullable=False),
        sa.Column("group_index", sa.Integer(), nullable=False),
        sa.Column("data_source", sa.String(length=64), nullable=False),
        sa.Column("instance_id", sa.String(length=200), nullable=False),
        sa.Column("fields", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.batch_id"], name=op.f("fk_instances_batches"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("batch_id", "group_index", name=op.f("pk_instances")),
    )
    op.create_table(
        "rollouts",
        sa.Column("rollout_id", sa.String(length=64), nullable=False),
        sa.Column("batch_id", sa.String(length=64), nullable=False),
        sa.Column("group_index", sa.Integer(), nullable=False),
        sa.Column("sample_index", sa.Integer(), nullable=False),
        sa.Column("data_source", sa.String(length=64), nullable=False),
        sa.Column("instance_id", sa.String(length=200), nullable=False),
        sa.Column("stage", sa.String(length=8), nullable=False),
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("n_failures", sa.Integer(), nullable=False),
        sa.Column("node", sa.String(length=128), nullable=True),
        sa.Column("owner", sa.String(length=200), nullable=True),
        sa.Column("lease_expires_at", sa.Double(), nullable=True),
        sa.Column("queued_at", sa.Double(), nullable=False),
        sa.Column("ready_at", sa.Double(), nullable=False),
        sa.Column("ring_at", sa.Double(), nullable=False),
        sa.Column("n_rings", sa.Integer(), nullable=False),
        sa.Column("policy_outcome", sa.String(length=32), nullable=True),
        sa.Column("outcome", sa.String(length=32), nullable=True),
        sa.Column("submission", sa.JSON(), nullable=True),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("failure_kind", sa.String(length=32), nullable=True),
        sa.Column("failure_message", sa.Text(), nullable=True),
        sa.Column("n_turns", sa.Integer(), nullable=False),
        sa.Column("n_response_tokens", sa.Integer(), nullable=False),
        sa.Column("submitted_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("finish_seq", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.batch_id"], name=op.f("fk_rollouts_batches"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("rollout_id", name=op.f("pk_rollouts")),
        postgresql_with={"fillfactor": 70},
    )
    with op.batch_alter_table("rollouts", schema=None) as batch_op:
        batch_op.create_index("ix_rollouts_batch_id_finish_seq", ["batch_id", "finish_seq"], unique=False)
        batch_op.create_index(
            "ix_rollouts_batch_id_group_index", ["batch_id", "group_index", "sample_index"], unique=False
        )
        batch_op.create_index(
            "ix_rollouts_live",
            ["node", "batch_id"],
            unique=False,
            sqlite_where=sa.text("finish_seq IS NULL"),
            postgresql_where=sa.text("finish_seq IS NULL"),
        )

    op.create_table(
        "attempts",
        sa.Column("rollout_id", sa.String(length=64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("stage", sa.String(length=8), nullable=False),
        sa.Column("node", sa.String(length=128), nullable=False),
        sa.Column("worker", sa.String(length=200), nullable=False),
        sa.Column("queued_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("result", sa.String(length=32), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["rollout_id"], ["rollouts.rollout_id"], name=op.f("fk_attempts_rollouts"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("rollout_id", "attempt", "stage", name=op.f("pk_attempts")),
    )
    op.create_table(
        "model_calls",
        sa.Column("rollout_id", sa.String(length=64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("call_index", sa.Integer(), nullable=False),
        sa.Column("messages", sa.JSON(), nullable=False),
        sa.Column("response", sa.JSON(), nullable=False),
        sa.Column("observations", sa.JSON(), nullable=False),
        sa.Column("finish_reason", sa.String(length=32), nullable=False),
        sa.Column("engine", sa.String(length=500), nullable=False),
        sa.Column("policy_version", sa.String(length=64), nullable=False),
        sa.Column("sampling", sa.JSON(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("latency_s", sa.Double(), nullable=False),
        sa.Column("n_prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("n_response_tokens", sa.Integer(), nullable=False),
        sa.Column("prefix_call", sa.Integer(), nullable=True),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=True),
        sa.Column("response_ids", sa.LargeBinary(), nullable=True),
        sa.Column("response_logprobs", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(
            ["rollout_id"], ["rollouts.rollout_id"], name=op.f("fk_model_calls_rollouts"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("rollout_id", "attempt", "call_index", name=op.f("pk_model_calls")),
    )
    op.create_table(
        "rewards",
        sa.Column("rollout_id", sa.String(length=64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("evaluator", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["rollout_id"], ["rollouts.rollout_id"], name=op.f("fk_rewards_rollouts"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("rollout_id", "attempt", name=op.f("pk_rewards")),
    )
    op.create_table(
        "segments",
        sa.Column("rollout_id", sa.String(length=64), nullable=False),
        sa.Column("segment_index", sa.Integer(), nullable=False),
        sa.Column("batch_id", sa.String(length=64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=False),
        sa.Column("response_ids", sa.LargeBinary(), nullable=False),
        sa.Column("response_mask", sa.LargeBinary(), nullable=False),
        sa.Column("response_logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("policy_versions", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["rollout_id"], ["rollouts.rollout_id"], name=op.f("fk_segments_rollouts"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("rollout_id", "segment_index", name=op.f("pk_segments")),
    )
    with op.batch_alter_table("segments", schema=None) as batch_op:
        batch_op.create_index("ix_segments_batch_id", ["batch_id"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("segments", schema=None) as batch_op:
        batch_op.drop_index("ix_segments_batch_id")

    op.drop_table("segments")
    op.drop_table("rewards")
    op.drop_table("model_calls")
    op.drop_table("attempts")
    with op.batch_alter_table("rollouts", schema=None) as batch_op:
        batch_op.drop_index(
            "ix_rollouts_live",
            sqlite_where=sa.text("finish_seq IS NULL"),
            postgresql_where=sa.text("finish_seq IS NULL"),
        )
        batch_op.drop_index("ix_rollouts_batch_id_group_index")
        batch_op.drop_index("ix_rollouts_batch_id_finish_seq")

    op.drop_table("rollouts")
    op.drop_table("instances")
    op.drop_table("nodes")
    op.drop_table("leaders")
    op.drop_table("engines")
    op.drop_table("batches")
