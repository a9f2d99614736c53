"""Which order named an engine's weights

Revision: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("engines", sa.Column("version_order", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("engines", "version_order")
