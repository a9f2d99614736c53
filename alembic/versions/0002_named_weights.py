"""The weights last named for a model, which outlive its engines

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
        "named_weights",
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("weights_path", sa.String(500), nullable=False),
        sa.Column("named_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("model", name=op.f("pk_named_weights")),
    )


def downgrade() -> None:
    op.drop_table("named_weights")
