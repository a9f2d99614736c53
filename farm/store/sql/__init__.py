"""The SQL layer of the store: tables, column types, connections, the database clock. It knows no transitions."""
