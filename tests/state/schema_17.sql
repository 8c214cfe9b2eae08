-- A state file of schema 17: job 1 runs, job 2 has succeeded.
BEGIN TRANSACTION;
CREATE TABLE attempt_steps (job_id INTEGER NOT NULL, number INTEGER NOT NULL, first_step INTEGER NOT NULL,
       last_step INTEGER NOT NULL, checkpoint_step INTEGER, PRIMARY KEY (job_id, number));
CREATE TABLE attempts (job_id INTEGER NOT NULL, number INTEGER NOT NULL, body TEXT NOT NULL, outcome_kind TEXT, outcome_detail TEXT NOT NULL DEFAULT '', outcome_step INTEGER, exit_code INTEGER,
       PRIMARY KEY (job_id, number));
CREATE TABLE audit (id INTEGER PRIMARY KEY AUTOINCREMENT, time_s REAL NOT NULL, person TEXT NOT NULL,
       verb TEXT NOT NULL, target TEXT NOT NULL, outcome TEXT NOT NULL);
CREATE TABLE claims (job_id INTEGER PRIMARY KEY, holder TEXT NOT NULL DEFAULT '',
       epoch INTEGER NOT NULL DEFAULT 0);
CREATE TABLE clusters (name TEXT PRIMARY KEY, job_id INTEGER, body BLOB NOT NULL);
CREATE TABLE commitments (id INTEGER PRIMARY KEY AUTOINCREMENT, time_s REAL NOT NULL, ended_s REAL,
       is_pending INTEGER NOT NULL, person TEXT NOT NULL, project TEXT NOT NULL, kind TEXT NOT NULL,
       names TEXT NOT NULL, usd REAL, usd_hour REAL NOT NULL, gpus REAL NOT NULL);
CREATE TABLE controllers (name TEXT PRIMARY KEY, until_s REAL NOT NULL);
CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, time_s REAL NOT NULL, kind TEXT NOT NULL,
       job_id INTEGER, cluster TEXT, data TEXT NOT NULL DEFAULT '{}');
CREATE TABLE forecasts (job_id INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE intents (token TEXT PRIMARY KEY, cluster TEXT NOT NULL, created_s REAL NOT NULL,
       body BLOB NOT NULL, outcome TEXT, closed_s REAL, nodes BLOB, detail TEXT NOT NULL DEFAULT '');
CREATE TABLE jobs (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, status TEXT NOT NULL,
       is_terminal INTEGER NOT NULL DEFAULT 0, request_id TEXT UNIQUE, task TEXT NOT NULL, secret_names BLOB NOT NULL,
       submitted_s REAL NOT NULL, ended_s REAL, failure TEXT NOT NULL DEFAULT '',
       cancel_requested INTEGER NOT NULL DEFAULT 0, progress BLOB, needs TEXT NOT NULL DEFAULT '[]', pipeline TEXT NOT NULL DEFAULT '', resumes INTEGER, first_attempt INTEGER NOT NULL DEFAULT 1, hedge INTEGER NOT NULL DEFAULT 2, uid TEXT NOT NULL DEFAULT '', outcome_kind TEXT, displaced_by INTEGER, displaced_s REAL);
INSERT INTO "jobs" VALUES(1,'nightly','RUNNING',0,NULL,'{"name":"nightly","resources":[{"accelerator":null,"accelerator_count":0,"cpus":null,"memory_gib":null,"memory_gib_per_vcpu":null,"instance_type":null,"cloud":null,"region":null,"zone":null,"use_spot":null,"disk_size_gib":256,"disk_tier":null,"network_tier":null,"ports":[],"image_id":null,"labels":{},"usd_hour_max":null,"origin":null}],"is_ordered":false,"num_nodes":1,"workdir":null,"repository":null,"file_mounts":{},"storage_mounts":[],"envs":{},"secrets":{},"setup":null,"run":"true","goal":null,"recovery":{"strategy":null,"max_restarts_on_errors":null,"recover_on_exit_codes":[],"stall_timeout_s":null,"checks_health":null,"nodes_min":null},"autostop":null,"checkpoint":{"every_s":null,"stall_s":5.0,"restart_s":300.0,"size_gib":0.0,"to":null},"unattended_s":null,"max_duration_s":null,"inputs":[],"outputs":[],"needs":{},"service":null,"pipeline":null,"group":null,"priority":0,"notify":null,"event_callback":null,"schedule":null,"notices":[],"origin":null}',X'5B5D',1800000000.0,NULL,'',0,NULL,'[]','',NULL,1,2,'mjd7r',NULL,NULL,NULL);
INSERT INTO "jobs" VALUES(2,'ended','SUCCEEDED',1,NULL,'{"name":"ended","resources":[{"accelerator":null,"accelerator_count":0,"cpus":null,"memory_gib":null,"memory_gib_per_vcpu":null,"instance_type":null,"cloud":null,"region":null,"zone":null,"use_spot":null,"disk_size_gib":256,"disk_tier":null,"network_tier":null,"ports":[],"image_id":null,"labels":{},"usd_hour_max":null,"origin":null}],"is_ordered":false,"num_nodes":1,"workdir":null,"repository":null,"file_mounts":{},"storage_mounts":[],"envs":{},"secrets":{},"setup":null,"run":"true","goal":null,"recovery":{"strategy":null,"max_restarts_on_errors":null,"recover_on_exit_codes":[],"stall_timeout_s":null,"checks_health":null,"nodes_min":null},"autostop":null,"checkpoint":{"every_s":null,"stall_s":5.0,"restart_s":300.0,"size_gib":0.0,"to":null},"unattended_s":null,"max_duration_s":null,"inputs":[],"outputs":[],"needs":{},"service":null,"pipeline":null,"group":null,"priority":0,"notify":null,"event_callback":null,"schedule":null,"notices":[],"origin":null}',X'5B5D',1800000000.0,1800000000.0,'',0,NULL,'[]','',NULL,1,2,'tubjm',NULL,NULL,NULL);
CREATE TABLE leader (one INTEGER PRIMARY KEY CHECK (one = 1), epoch INTEGER NOT NULL, beat_s REAL NOT NULL);
INSERT INTO "leader" VALUES(1,0,0.0);
CREATE TABLE limits (scope TEXT NOT NULL, name TEXT NOT NULL, usd_month REAL, gpus REAL,
       PRIMARY KEY (scope, name));
CREATE TABLE log_offsets (job_id INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, source_bytes INTEGER NOT NULL,
       file_bytes INTEGER NOT NULL);
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO "meta" VALUES('lineage','8c46709710572ca2');
CREATE TABLE nodes (cloud TEXT NOT NULL, id TEXT NOT NULL, cluster TEXT NOT NULL, job_id INTEGER,
       usd_hour REAL NOT NULL, created_s REAL NOT NULL, ended_s REAL, is_spot INTEGER, PRIMARY KEY (cloud, id));
CREATE TABLE owners (kind TEXT NOT NULL, name TEXT NOT NULL, person TEXT NOT NULL, PRIMARY KEY (kind, name));
CREATE TABLE paces (cloud TEXT NOT NULL, answer TEXT NOT NULL, mean_s REAL NOT NULL, deviation_s REAL NOT NULL,
       PRIMARY KEY (cloud, answer));
CREATE TABLE refusals (cloud TEXT NOT NULL, region TEXT NOT NULL, zone TEXT NOT NULL,
       instance_type TEXT NOT NULL, is_spot INTEGER NOT NULL, expires_s REAL NOT NULL, reason TEXT NOT NULL, count INTEGER NOT NULL DEFAULT 1, probed_until_s REAL NOT NULL DEFAULT 0, reask_s REAL NOT NULL DEFAULT 0, hints TEXT NOT NULL DEFAULT '[]', refused_s REAL NOT NULL DEFAULT 0,
       PRIMARY KEY (cloud, region, zone, instance_type, is_spot));
CREATE TABLE retry_budgets (cloud TEXT PRIMARY KEY, tokens REAL NOT NULL, at_s REAL NOT NULL);
CREATE TABLE run_ids (cluster TEXT PRIMARY KEY, newest INTEGER NOT NULL);
CREATE TABLE service_events (service TEXT NOT NULL, number INTEGER NOT NULL, time_s REAL NOT NULL,
       kind TEXT NOT NULL, replica INTEGER, detail TEXT NOT NULL, PRIMARY KEY (service, number));
CREATE TABLE service_replicas (service TEXT NOT NULL, number INTEGER NOT NULL, job_id INTEGER NOT NULL,
       body TEXT NOT NULL, PRIMARY KEY (service, number));
CREATE TABLE service_versions (service TEXT NOT NULL, version INTEGER NOT NULL, task TEXT NOT NULL,
       secret_names TEXT NOT NULL, was_ready INTEGER NOT NULL, PRIMARY KEY (service, version));
CREATE TABLE services (name TEXT PRIMARY KEY, uid TEXT NOT NULL, version INTEGER NOT NULL, host TEXT NOT NULL,
       port INTEGER NOT NULL, mode TEXT NOT NULL, wanted INTEGER NOT NULL, drawn INTEGER NOT NULL,
       created_s REAL NOT NULL, down_requested INTEGER NOT NULL, failure TEXT NOT NULL);
CREATE TABLE tokens (id INTEGER PRIMARY KEY AUTOINCREMENT, digest TEXT NOT NULL UNIQUE, person TEXT NOT NULL,
       role TEXT NOT NULL, created_s REAL NOT NULL, expires_s REAL, revoked_s REAL, project TEXT NOT NULL DEFAULT '');
CREATE TABLE totals (month TEXT NOT NULL, cloud TEXT NOT NULL, pricing TEXT NOT NULL, node_hours REAL NOT NULL,
       usd REAL NOT NULL, PRIMARY KEY (month, cloud, pricing));
CREATE INDEX intents_cluster ON intents (cluster);
CREATE INDEX nodes_cluster ON nodes (cluster);
CREATE TRIGGER jobs_terminal BEFORE UPDATE OF status, failure, ended_s ON jobs WHEN OLD.is_terminal
       BEGIN SELECT RAISE(ABORT, 'a terminal job never changes'); END;
CREATE INDEX events_job ON events (job_id);
CREATE INDEX jobs_live ON jobs (id) WHERE NOT is_terminal;
CREATE INDEX attempts_open ON attempts (job_id) WHERE json_extract(body, '$.ended_s') IS NULL;
CREATE INDEX intents_open ON intents (created_s) WHERE outcome IS NULL;
CREATE INDEX nodes_job ON nodes (job_id);
CREATE TRIGGER events_stay BEFORE DELETE ON events WHEN OLD.time_s > unixepoch() - 90 * 86400
       BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE TRIGGER events_keep BEFORE UPDATE ON events
       BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('jobs',2);
PRAGMA user_version=17;
COMMIT;
