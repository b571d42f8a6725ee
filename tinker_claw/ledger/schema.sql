-- One file, one story: session -> turn -> next state -> votes -> verdict, hints -> sample -> step -> version.
-- Times are seconds since 1970. Token arrays are little-endian arrays, packed (codec.py).

CREATE TABLE meta (
  key   TEXT PRIMARY KEY,
  value TEXT NOT NULL
) STRICT;

CREATE TABLE sessions (
  id         INTEGER PRIMARY KEY AUTOINCREMENT,
  user       TEXT NOT NULL,
  key        TEXT NOT NULL,
  created_at REAL NOT NULL,
  closed_at  REAL,                       -- NULL: it may go on; set when it ended or has long been idle
  private    INTEGER NOT NULL DEFAULT 0, -- 1: nothing of it is kept; 2: it was private once
  task       TEXT,                       -- what it is about, as the client names it
  group_id   INTEGER REFERENCES groups (id),
  episode    INTEGER NOT NULL DEFAULT 0, -- 1: its outcome is to come, or its group's; 2: it is over, trained or not
  drawn      INTEGER NOT NULL DEFAULT 0, -- 1: which lessons it is told is decided
  UNIQUE (user, key)
) STRICT;
CREATE INDEX sessions_by_user ON sessions (user); -- in the order of their ids
CREATE INDEX sessions_by_group ON sessions (group_id) WHERE group_id IS NOT NULL;
CREATE INDEX sessions_running ON sessions (id) WHERE episode = 1;
CREATE INDEX sessions_episodes ON sessions (id) WHERE episode > 0;

-- Sessions that try the same task, to be compared with one another.
CREATE TABLE groups (
  id   INTEGER PRIMARY KEY AUTOINCREMENT,
  user TEXT NOT NULL,
  task TEXT NOT NULL,                    -- '': none was named
  name TEXT NOT NULL,
  size INTEGER NOT NULL,                 -- sessions, as the client says
  over INTEGER NOT NULL DEFAULT 0,       -- 1: it was queued, or has expired; who comes later is not trained
  UNIQUE (user, task, name)
) STRICT;

CREATE TABLE versions (
  id          INTEGER PRIMARY KEY,
  parent      INTEGER REFERENCES versions (id),
  step        INTEGER NOT NULL,          -- optimizer steps since the base, along the lineage
  state_ref   TEXT,                      -- NULL: this step was not saved (--save-interval > 1)
  sampler_ref TEXT NOT NULL,
  created_at  REAL NOT NULL
) STRICT;

-- What users have said of how they want replies, to be told in the prompts of their later sessions.
CREATE TABLE lessons (
  id         INTEGER PRIMARY KEY AUTOINCREMENT,
  user       TEXT NOT NULL,
  text       TEXT NOT NULL,              -- the sentence that is told
  words      TEXT NOT NULL,              -- the user's own, which show that it lasts; '': they wrote the sentence
  scope      TEXT NOT NULL,              -- always, for this kind of request
  turn_id    INTEGER,                    -- the reply that they were said of; NULL: the user wrote it
  state      TEXT NOT NULL,              -- tried, told, learned, dropped
  kept       INTEGER NOT NULL,           -- 1: the user has kept or written it
  reason     TEXT,                       -- why it is in this state; NULL: it is new
  version    INTEGER REFERENCES versions (id), -- by which it was learned; NULL: it is not
  created_at REAL NOT NULL,              -- when it was said, the last time
  changed_at REAL NOT NULL               -- when its state changed
) STRICT;

-- Lessons that a session is told, or not told for comparison, as decided when it starts.
CREATE TABLE drawn (
  lesson_id  INTEGER NOT NULL REFERENCES lessons (id) ON DELETE CASCADE,
  session_id INTEGER NOT NULL REFERENCES sessions (id),
  told       INTEGER NOT NULL,           -- 1: it is told; 0: it is left out
  PRIMARY KEY (lesson_id, session_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX drawn_by_session ON drawn (session_id, told);

-- What prompts share: 1024 ids each, once.
CREATE TABLE prompt_blocks (
  id     INTEGER PRIMARY KEY,
  digest BLOB NOT NULL UNIQUE,           -- of the ids
  ids    BLOB NOT NULL
) STRICT;

-- What is short and often asked for stands first: a row is read from its beginning.
CREATE TABLE turns (
  id                INTEGER PRIMARY KEY AUTOINCREMENT,
  session_id        INTEGER NOT NULL REFERENCES sessions (id),
  idx               INTEGER NOT NULL,    -- 0, 1, 2 ... within the session, per kind
  kind              TEXT NOT NULL,
  policy_version    INTEGER NOT NULL REFERENCES versions (id),
  created_at        REAL NOT NULL,
  settled           INTEGER NOT NULL,    -- 1: it became a sample, or was refused
  untrained_because TEXT,                -- NULL while it may still be trained
  blanked           TEXT,                -- why its texts and tokens are gone: forgotten, or dropped; NULL: they are here
  prompt_tokens     INTEGER NOT NULL,
  completion_tokens INTEGER NOT NULL,
  cached_tokens     INTEGER NOT NULL,
  topk              INTEGER NOT NULL,    -- candidates per token, 0 for none
  hint_at           INTEGER,
  told              TEXT,                -- JSON of the lessons in the prompt: their ids, where they begin, how many tokens; NULL: none
  stop_reason       TEXT NOT NULL,
  call              TEXT NOT NULL DEFAULT '', -- what the request was for: user turn, tool loop, recap ...
  kind_reason       TEXT NOT NULL,
  fallback          TEXT,                -- why another than the current version answered; NULL: it did not
  lost              TEXT,                -- why no turn got this request as its next state, though one waits; NULL: one did, or none does
  trace             TEXT,                -- the client's trace id, where it sent one
  client            TEXT NOT NULL DEFAULT '', -- the agent's program
  voices            TEXT NOT NULL DEFAULT '[]', -- JSON: writer, name and characters of each piece that was new
  response_id       TEXT,                -- the reply's name for its client
  params            TEXT NOT NULL,       -- JSON of SamplingParams
  reply_digest      TEXT NOT NULL,
  history           TEXT NOT NULL,       -- JSON: digests of the messages that will come back
  asked_by          TEXT NOT NULL DEFAULT 'owner', -- who wrote the request
  request_text      TEXT NOT NULL,
  reply_text        TEXT NOT NULL,
  blocks            BLOB NOT NULL DEFAULT x'', -- int32 ids of prompt_blocks, in order
  prompt            BLOB NOT NULL,       -- the ids behind the blocks
  tokens            BLOB NOT NULL,
  logprobs          BLOB NOT NULL,
  topk_ids          BLOB NOT NULL,
  topk_logprobs     BLOB NOT NULL
) STRICT;
CREATE INDEX turns_by_session ON turns (session_id, kind, idx);
-- For filters, which look at turns in their order.
CREATE INDEX turns_narrow ON turns (id, session_id, kind, created_at);
CREATE INDEX turns_open ON turns (id, session_id) WHERE settled = 0;
-- For sums over all turns, whose rows are too wide to be read for that.
CREATE INDEX turns_by_version ON turns (kind, policy_version, idx, session_id, told);
CREATE INDEX turns_untrained ON turns (untrained_because) WHERE untrained_because IS NOT NULL;
CREATE INDEX turns_lost ON turns (lost) WHERE lost IS NOT NULL;
CREATE INDEX turns_unknown ON turns (client) WHERE call = 'unknown';
CREATE INDEX turns_by_response ON turns (response_id) WHERE response_id IS NOT NULL;

-- Files of images that may be trained (--images train), each once.
CREATE TABLE images (
  id     INTEGER PRIMARY KEY,
  digest BLOB NOT NULL UNIQUE,           -- SHA-256 of the file
  format TEXT NOT NULL,                  -- png, jpeg
  data   BLOB NOT NULL                   -- the file, without metadata
) STRICT;

-- Where they stand in prompts. An image goes with its last turn.
CREATE TABLE turn_images (
  turn_id  INTEGER NOT NULL REFERENCES turns (id),
  image_id INTEGER NOT NULL REFERENCES images (id),
  at       INTEGER NOT NULL,             -- index of its first token in the prompt
  tokens   INTEGER NOT NULL              -- how many it takes, all the same placeholder
) STRICT;
CREATE INDEX turn_images_by_turn ON turn_images (turn_id, at);
CREATE INDEX turn_images_by_image ON turn_images (image_id);

CREATE TABLE next_states (
  turn_id    INTEGER PRIMARY KEY REFERENCES turns (id),
  role       TEXT NOT NULL,              -- user: the owner's words; tool; other: what other people, mails or hooks say
  text       TEXT NOT NULL,
  beside     TEXT NOT NULL DEFAULT '[]', -- JSON: writer and words of what stands beside the owner's words
  created_at REAL NOT NULL
) STRICT;

-- Who wrote first in a chat service, as a keyed digest, and whether anybody else has.
CREATE TABLE channels (
  user      TEXT NOT NULL,
  channel   TEXT NOT NULL,
  first     BLOB,                        -- of who wrote directly first; NULL: nobody did
  strangers INTEGER NOT NULL DEFAULT 0,  -- 1: others wrote directly, too
  groups    INTEGER NOT NULL DEFAULT 0,  -- 1: somebody wrote in a group
  PRIMARY KEY (user, channel)
) STRICT;

CREATE TABLE votes (
  turn_id INTEGER NOT NULL REFERENCES turns (id),
  about   TEXT NOT NULL,                 -- 'verdict', 'hint', or 'audit': the auditor's; 'in vain': a try that came to nothing
  n       INTEGER NOT NULL,
  value   INTEGER,                       -- NULL: could not be parsed
  answer  TEXT NOT NULL,
  PRIMARY KEY (turn_id, about, n)
) STRICT;

CREATE TABLE verdicts (
  turn_id    INTEGER PRIMARY KEY REFERENCES turns (id),
  value      INTEGER,                    -- NULL: no valid vote, hence no verdict
  created_at REAL NOT NULL,
  source     TEXT NOT NULL DEFAULT 'judge', -- user or client: they said so, whatever the votes are
  score      REAL,                       -- theirs, -1 to 1, of which the value is the sign; NULL: the judge's
  judged     INTEGER,                    -- what the judge's votes came to; NULL also where it was not asked
  prompt     TEXT,                       -- version of what the judge was asked; NULL: no judge was
  by_second  INTEGER NOT NULL DEFAULT 0, -- 1: the fallback gave it
  audit      INTEGER                     -- the auditor's verdict; NULL: it gave none, or was not asked
) STRICT;
CREATE INDEX verdicts_by_value ON verdicts (value);

-- What was said of replies and sessions outright, by the user or a program. The newest one counts.
CREATE TABLE feedback (
  id         INTEGER PRIMARY KEY AUTOINCREMENT,
  user       TEXT NOT NULL,
  key        TEXT,                       -- the client's name for it: sent again it is the same one
  turn_id    INTEGER NOT NULL REFERENCES turns (id), -- of a session: its last turn at that time
  session_id INTEGER NOT NULL REFERENCES sessions (id),
  score      REAL NOT NULL,              -- -1 to 1
  text       TEXT NOT NULL,
  source     TEXT NOT NULL,              -- user, client
  final      INTEGER NOT NULL,           -- 1: of how the session ended, and of no reply
  task       TEXT,                       -- that the session was about, and the group that it is of
  task_group TEXT,
  unused     TEXT,                       -- why no reply is trained by it; NULL: it is the verdict of one
  created_at REAL NOT NULL,
  UNIQUE (user, key)
) STRICT;
CREATE INDEX feedback_by_turn ON feedback (turn_id);
CREATE INDEX feedback_by_session ON feedback (session_id, id) WHERE final = 1;

CREATE TABLE hints (
  turn_id INTEGER NOT NULL REFERENCES turns (id),
  rank    INTEGER NOT NULL,
  text    TEXT NOT NULL,
  source  TEXT NOT NULL DEFAULT 'judge', -- user or client: they said so outright
  PRIMARY KEY (turn_id, rank)
) STRICT;

-- How much likelier a reply is to the teacher where it is told something, in nats per token.
CREATE TABLE gains (
  turn_id INTEGER PRIMARY KEY REFERENCES turns (id),
  user    TEXT NOT NULL,
  gain    REAL NOT NULL
) STRICT;
CREATE INDEX gains_by_user ON gains (user, turn_id);

CREATE TABLE samples (
  id               INTEGER PRIMARY KEY AUTOINCREMENT,
  turn_id          INTEGER NOT NULL UNIQUE REFERENCES turns (id),
  reward           REAL,                 -- NULL: hint only; while it is held, the mean of its votes alone
  hint             TEXT,                 -- NULL: reward only
  untaught         TEXT,                 -- why it has no hint, though there was one; NULL: there was none, or it has it
  weight           REAL,                 -- of its distillation; NULL: reward only
  teacher_logprobs BLOB,
  teacher_targets  BLOB,
  teacher_ids      BLOB,                 -- the teacher's own candidates, and below what it gives them
  teacher_own      BLOB,
  overlap          INTEGER,
  advantage        REAL,                 -- of the reply, in the newest step that took it; NULL: none has
  untold           REAL,                 -- nats a token by which the reply is likelier with the lessons in its prompt; NULL: it was not measured
  advantages       BLOB,                 -- of its tokens, before normalisation
  state            TEXT NOT NULL,        -- held (for an outcome), queued, trained, expired, quarantined
  expired_because  TEXT,                 -- NULL: of its age, or it has not expired
  step_id          INTEGER REFERENCES steps (id),
  created_at       REAL NOT NULL
) STRICT;
CREATE INDEX samples_by_state ON samples (state, id);
CREATE INDEX samples_by_turn ON samples (state, turn_id);
CREATE INDEX samples_untold ON samples (turn_id, untold) WHERE untold IS NOT NULL;

CREATE TABLE steps (
  id          INTEGER PRIMARY KEY AUTOINCREMENT,
  status      TEXT NOT NULL,             -- intent, committed, void
  parent      INTEGER NOT NULL REFERENCES versions (id),
  version     INTEGER REFERENCES versions (id),
  created_at  REAL NOT NULL,
  finished_at REAL,
  metrics     TEXT,                      -- JSON
  method_state TEXT,                     -- JSON: what the method goes on from after it; NULL: nothing
  error       TEXT,
  outage      INTEGER NOT NULL DEFAULT 0 -- 1: void by no fault of one of its samples, as when the service was away
) STRICT;

-- From versions to their steps, whose metrics are long.
CREATE INDEX steps_by_version ON steps (version) WHERE version IS NOT NULL;
-- Of steps that a crash has undone.
CREATE INDEX steps_lost ON steps (version) WHERE status = 'void' AND version IS NOT NULL;

CREATE TABLE step_samples (
  step_id   INTEGER NOT NULL REFERENCES steps (id),
  sample_id INTEGER NOT NULL REFERENCES samples (id),
  PRIMARY KEY (step_id, sample_id)
) STRICT;
CREATE INDEX step_samples_by_sample ON step_samples (sample_id);

-- What a service billed, and for what. Turn and step are NULL where neither caused it.
CREATE TABLE spend (
  id         INTEGER PRIMARY KEY AUTOINCREMENT,
  created_at REAL NOT NULL,
  purpose    TEXT NOT NULL,              -- serve, judge, teacher, train
  turn_id    INTEGER REFERENCES turns (id),
  step_id    INTEGER REFERENCES steps (id),
  prefill    INTEGER NOT NULL,           -- prompt tokens computed
  cached     INTEGER NOT NULL,           -- prompt tokens from a cache
  sampled    INTEGER NOT NULL,
  trained    INTEGER NOT NULL,
  usd        REAL                        -- NULL: the price was not known
) STRICT;
CREATE INDEX spend_by_turn ON spend (turn_id);
CREATE INDEX spend_by_step ON spend (step_id);
CREATE INDEX spend_sums ON spend (purpose, usd);
