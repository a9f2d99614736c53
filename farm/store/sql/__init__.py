"""The SQL below the store: tables, column types, connections, the clock of the database; it knows no transition."""
