"""The store on a PostgreSQL server, shared by any number of replicas."""
