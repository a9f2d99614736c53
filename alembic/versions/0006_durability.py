"""How often a rollout was lost, what an instance and a node may fail, and what a trainer has acknowledged

Revision: 0006
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("batches", sa.Column("max_losses", sa.Integer(), nullable=False, server_default="10"))
    op.add_column("batches", sa.Column("quarantine_after", sa.Integer(), nullable=False, server_default="6"))
    op.add_column("rollouts", sa.Column("n_lost", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("nodes", sa.Column("sick_until", sa.Double(), nullable=True))
    op.add_column("nodes", sa.Column("sick_why", sa.Text(), nullable=False, server_default=""))
    op.add_column("nodes", sa.Column("n_trips", sa.Integer(), nullable=False, server_default="0"))
    op.create_table(
        "deliveries",
        sa.Column("batch_id", sa.String(64), nullable=False),
        sa.Column("consumer", sa.String(64), nullable=False),
        sa.Column("cursor", sa.Integer(), nullable=False),
        sa.Column("acknowledged_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.batch_id"], name=op.f("fk_deliveries_batches"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("batch_id", "consumer", name=op.f("pk_deliveries")),
    )


def downgrade() -> None:
    op.drop_table("deliveries")
    for table, column in (
        ("nodes", "n_trips"),
        ("nodes", "sick_why"),
        ("nodes", "sick_until"),
        ("rollouts", "n_lost"),
        ("batches", "quarantine_after"),
        ("batches", "max_losses"),
    ):
        op.drop_column(table, column)
