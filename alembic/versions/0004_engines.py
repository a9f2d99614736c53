"""Engines shared by all nodes

Revision: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def _columns() -> list[sa.Column]:
    return [
        sa.Column("tokenizer", sa.String(length=500), nullable=False, server_default=""),
        sa.Column("tool_format", sa.String(length=32), nullable=False, server_default=""),
        sa.Column("info", sa.JSON(), nullable=False, server_default="{}"),
        sa.Column("paused", sa.String(length=8), nullable=False, server_default=""),
        sa.Column("paused_by", sa.String(length=200), nullable=False, server_default=""),
        sa.Column("paused_at", sa.Double(), nullable=True),
        sa.Column("version", sa.String(length=64), nullable=False, server_default=""),
        sa.Column("n_orders", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("n_done", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("engine_paused", sa.String(length=8), nullable=False, server_default=""),
        sa.Column("engine_version", sa.String(length=64), nullable=False, server_default=""),
        sa.Column("failure", sa.String(length=1000), nullable=False, server_default=""),
    ]


def upgrade() -> None:
    for column in _columns():
        op.add_column("engines", column)
    op.create_table(
        "engine_users",
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("uses", sa.JSON(), nullable=False),
        sa.Column("heartbeat_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("owner", name=op.f("pk_engine_users")),
    )


def downgrade() -> None:
    op.drop_table("engine_users")
    for column in reversed(_columns()):
        op.drop_column("engines", column.name)
