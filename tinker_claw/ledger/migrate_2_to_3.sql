-- Version 3: what a request was for, its trace, which version stood in; sessions that are over;
-- prompts share blocks. Prompts of older turns stay whole, which is a tail without blocks.
ALTER TABLE sessions ADD COLUMN closed_at REAL;
ALTER TABLE sessions ADD COLUMN private INTEGER NOT NULL DEFAULT 0;
ALTER TABLE turns ADD COLUMN call TEXT NOT NULL DEFAULT '';
ALTER TABLE turns ADD COLUMN trace TEXT;
ALTER TABLE turns ADD COLUMN fallback TEXT;
ALTER TABLE turns ADD COLUMN blocks BLOB NOT NULL DEFAULT x'';
CREATE TABLE prompt_blocks (
  id     INTEGER PRIMARY KEY,
  digest BLOB NOT NULL UNIQUE,
  ids    BLOB NOT NULL
) STRICT;
DROP INDEX turns_open;
CREATE INDEX turns_open ON turns (id, session_id) WHERE settled = 0;
CREATE INDEX turns_by_version ON turns (kind, policy_version, idx);
CREATE INDEX turns_untrained ON turns (untrained_because) WHERE untrained_because IS NOT NULL;
CREATE INDEX spend_sums ON spend (purpose, usd);
