"""The fixtures that give tests a PostgreSQL and a NATS server."""

import psycopg

from support.engines import execute, new_database


def test_database_of_a_test_is_empty_and_its_own(postgres_database: str, postgres_url: str) -> None:
    execute(postgres_database, "CREATE TABLE t (x int)")
    with new_database(postgres_url) as other, psycopg.connect(other) as connection:
        rows = connection.execute("SELECT count(*) FROM pg_tables WHERE tablename = 't'").fetchall()
    assert rows == [(0,)]


def test_database_from_a_template_has_its_tables(postgres_url: str) -> None:
    with new_database(postgres_url) as template:
        execute(template, "CREATE TABLE t (x int)", "INSERT INTO t VALUES (7)")
        with (
            new_database(postgres_url, template=template.rpartition("/")[2]) as url,
            psycopg.connect(url) as connection,
        ):
            assert connection.execute("SELECT x FROM t").fetchall() == [(7,)]


def test_nats_url_names_a_server_with_jetstream(nats_url: str) -> None:
    import asyncio

    import nats

    async def streams() -> int:
        client = await nats.connect(nats_url)
        try:
            return (await client.jetstream().account_info()).streams
        finally:
            await client.close()

    assert asyncio.run(streams()) >= 0
