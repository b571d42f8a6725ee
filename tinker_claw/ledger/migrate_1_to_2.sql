-- Version 2: what a service billed; whether a void step was the service's fault.
ALTER TABLE steps ADD COLUMN outage INTEGER NOT NULL DEFAULT 0;

CREATE TABLE spend (
  id         INTEGER PRIMARY KEY AUTOINCREMENT,
  created_at REAL NOT NULL,
  purpose    TEXT NOT NULL,
  turn_id    INTEGER REFERENCES turns (id),
  step_id    INTEGER REFERENCES steps (id),
  prefill    INTEGER NOT NULL,
  cached     INTEGER NOT NULL,
  sampled    INTEGER NOT NULL,
  trained    INTEGER NOT NULL,
  usd        REAL
) STRICT;
CREATE INDEX spend_by_turn ON spend (turn_id);
CREATE INDEX spend_by_step ON spend (step_id);
