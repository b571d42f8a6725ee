-- Version 4: calls that break the schema of a strict tool.
ALTER TABLE turns ADD COLUMN misfit TEXT;
