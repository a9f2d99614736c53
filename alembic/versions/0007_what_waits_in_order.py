"""What waits can be read in the order in which it is to be placed, without looking at all of it

The index of what has ended is of that alone, so that no database takes it for what waits.

Revision: 0007
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_LIVE = sa.text("finish_seq IS NULL")
_ENDED = sa.text("finish_seq IS NOT NULL")


def upgrade() -> None:
    _drop()
    op.create_index(
        "ix_rollouts_live",
        "rollouts",
        ["node", "batch_id", "group_index", "sample_index"],
        sqlite_where=_LIVE,
        postgresql_where=_LIVE,
    )
    op.create_index(
        "ix_rollouts_batch_id_finish_seq",
        "rollouts",
        ["batch_id", "finish_seq"],
        sqlite_where=_ENDED,
        postgresql_where=_ENDED,
    )


def downgrade() -> None:
    _drop()
    op.create_index("ix_rollouts_live", "rollouts", ["node", "batch_id"], sqlite_where=_LIVE, postgresql_where=_LIVE)
    op.create_index("ix_rollouts_batch_id_finish_seq", "rollouts", ["batch_id", "finish_seq"])


def _drop() -> None:
    op.drop_index("ix_rollouts_live", table_name="rollouts")
    op.drop_index("ix_rollouts_batch_id_finish_seq", table_name="rollouts")
