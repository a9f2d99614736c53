"""What is known of tokens: weights, mismatches, invalid calls

Revision: 0003

Columns are added and dropped in place: a table that SQLite made anew would take along what refers to it.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def _count(name: str) -> sa.Column:
    return sa.Column(name, sa.Integer(), server_default=sa.text("0"), nullable=False)


def _new_columns() -> list[tuple[str, sa.Column]]:
    return [
        ("model_calls", sa.Column("versions", sa.JSON(), server_default=sa.text("'[]'"), nullable=False)),
        ("model_calls", sa.Column("stop_reason", sa.JSON(), nullable=True)),
        ("model_calls", sa.Column("n_cached_tokens", sa.Integer(), nullable=True)),
        ("model_calls", _count("n_invalid")),
        ("model_calls", sa.Column("begins", sa.Text(), server_default=sa.text("''"), nullable=False)),
        ("model_calls", sa.Column("mismatch", sa.Integer(), nullable=True)),
        ("segments", sa.Column("mismatch", sa.Integer(), nullable=True)),
        ("rollouts", _count("n_invalid_actions")),
        ("rollouts", _count("n_mismatches")),
        ("rollouts", _count("n_segments")),
        ("rollouts", _count("n_restarts")),
        ("rollouts", sa.Column("version_min", sa.Integer(), nullable=True)),
        ("rollouts", sa.Column("version_max", sa.Integer(), nullable=True)),
    ]


def upgrade() -> None:
    for table, column in _new_columns():
        op.add_column(table, column)


def downgrade() -> None:
    for table, column in reversed(_new_columns()):
        op.drop_column(table, column.name)
