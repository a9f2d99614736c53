"""Artefacts of rollouts

Revision: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "artefacts",
        sa.Column("rollout_id", sa.String(length=64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("media_type", sa.String(length=100), nullable=False),
        sa.Column("n_bytes", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["rollout_id"], ["rollouts.rollout_id"], name=op.f("fk_artefacts_rollouts"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("rollout_id", "attempt", "name", name=op.f("pk_artefacts")),
    )


def downgrade() -> None:
    op.drop_table("artefacts")
