"""Rewards of environments for single turns

Revision: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("model_calls", sa.Column("reward", sa.Double(), nullable=True))
    op.add_column("segments", sa.Column("turn_rewards", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    op.drop_column("segments", "turn_rewards")
    op.drop_column("model_calls", "reward")
