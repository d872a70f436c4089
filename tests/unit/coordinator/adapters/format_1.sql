BEGIN TRANSACTION;
CREATE TABLE record (
    session INTEGER NOT NULL,  -- 1, 2, ...: in order of opening
    seq     INTEGER NOT NULL,  -- 0, 1, ... within the session, without gaps
    at      REAL    NOT NULL,  -- session time in seconds
    type    TEXT    NOT NULL,  -- class of the event
    body    TEXT    NOT NULL,  -- its fields as JSON
    PRIMARY KEY (session, seq)
) WITHOUT ROWID
;
INSERT INTO "record" VALUES(1,0,0.0,'SessionOpened','{"session_id":"s1","rules":{"rounds":2,"epochs":5,"min_participants":2,"fraction_participants":"2/3","num_required":2,"max_participants":9,"start_participants":2,"start_timeout_s":60.0,"controller":"random","aggregation":"weighted_average","seed":18446744073709551615,"heartbeat_time_s":10.0,"heartbeat_timeout_s":5.0,"initial":"workload"},"at":0.0}');
INSERT INTO "record" VALUES(1,1,3.00000000000000044408e-01,'ParticipantJoined','{"participant_id":"a","profile":{"num_samples":10,"num_features":4,"classes":["no","yes"]},"at":0.30000000000000004}');
INSERT INTO "record" VALUES(1,2,3.00000000000000044408e-01,'ParticipantJoined','{"participant_id":"b","profile":{"num_samples":10,"num_features":4,"classes":["no","yes"]},"at":0.30000000000000004}');
INSERT INTO "record" VALUES(1,3,3.00000000000000044408e-01,'ParticipantsGathered','{}');
INSERT INTO "record" VALUES(1,4,3.00000000000000044408e-01,'ModelRequested','{"profiles":[{"num_samples":10,"num_features":4,"classes":["no","yes"]},{"num_samples":10,"num_features":4,"classes":["no","yes"]}]}');
INSERT INTO "record" VALUES(1,5,3.00000000000000044408e-01,'ParticipantJoined','{"participant_id":"c","profile":{"num_samples":10,"num_features":4,"classes":["no","yes"]},"at":0.30000000000000004}');
INSERT INTO "record" VALUES(1,6,1.5,'InitialisationRefused','{"reason":"all rows are of one class"}');
INSERT INTO "record" VALUES(1,7,1.5,'ModelRequested','{"profiles":[{"num_samples":10,"num_features":4,"classes":["no","yes"]},{"num_samples":10,"num_features":4,"classes":["no","yes"]},{"num_samples":10,"num_features":4,"classes":["no","yes"]}]}');
INSERT INTO "record" VALUES(1,8,2.0,'ParticipantJoined','{"participant_id":"d","profile":{"num_samples":7,"num_features":4,"classes":["no"]},"at":2.0}');
INSERT INTO "record" VALUES(1,9,3.0,'ModelInitialised','{"model":{"round":0,"ref":{"key":"0/global","size_bytes":152,"digest":"00000000000000000000000000000000"},"dtype":"float32","shape":[3],"layout":[{"name":"weights","shape":[1,3],"dtype":"float32"}],"metadata":{"workload":"sgd","classes":"[\"no\",\"yes\"]"}}}');
INSERT INTO "record" VALUES(1,10,3.0,'RoundOpened','{"round":0,"selected":["b","c","a"],"epochs":5,"at":3.0}');
INSERT INTO "record" VALUES(1,11,3.0,'UpdateAccepted','{"round":0,"update":{"participant_id":"b","weights":{"ref":{"key":"0/b","size_bytes":128,"digest":"11111111111111111111111111111111"},"dtype":"float32","shape":[3],"first_bad":null},"num_samples":7}}');
INSERT INTO "record" VALUES(1,12,3.0,'UploadNameBound','{"participant_id":"c","upload_name":"3f2c-uuid"}');
INSERT INTO "record" VALUES(1,13,3.0,'UpdateAccepted','{"round":0,"update":{"participant_id":"c","weights":{"ref":{"key":"0/3f2c-uuid","size_bytes":128,"digest":"22222222222222222222222222222222"},"dtype":"float32","shape":[3],"first_bad":null},"num_samples":0}}');
INSERT INTO "record" VALUES(1,14,8.25,'ParticipantLeft','{"participant_id":"a","cause":"left"}');
INSERT INTO "record" VALUES(1,15,8.25,'ParticipantsSelected','{"round":0,"selected":["d"]}');
INSERT INTO "record" VALUES(1,16,8.25,'ParticipantLeft','{"participant_id":"b","cause":"left"}');
INSERT INTO "record" VALUES(1,17,8.25,'ParticipantLeft','{"participant_id":"c","cause":"left"}');
INSERT INTO "record" VALUES(1,18,8.25,'RoundPaused','{"round":0}');
INSERT INTO "record" VALUES(1,19,9.0,'ParticipantJoined','{"participant_id":"e","profile":{"num_samples":10,"num_features":4,"classes":["no","yes"]},"at":9.0}');
INSERT INTO "record" VALUES(1,20,9.0,'RoundResumed','{"round":0}');
INSERT INTO "record" VALUES(1,21,9.0,'ParticipantJoined','{"participant_id":"f","profile":{"num_samples":10,"num_features":4,"classes":["no","yes"]},"at":9.0}');
INSERT INTO "record" VALUES(1,22,9.0,'UpdateAccepted','{"round":0,"update":{"participant_id":"d","weights":{"ref":{"key":"0/d","size_bytes":128,"digest":"33333333333333333333333333333333"},"dtype":"float32","shape":[3],"first_bad":null},"num_samples":12}}');
INSERT INTO "record" VALUES(1,23,9.0,'RoundClosed','{"round":0}');
INSERT INTO "record" VALUES(1,24,12.5,'ModelPublished','{"round":0,"model":{"round":1,"ref":{"key":"1/global","size_bytes":152,"digest":"11111111111111111111111111111111"},"dtype":"float32","shape":[3],"layout":[{"name":"weights","shape":[1,3],"dtype":"float32"}],"metadata":{"workload":"sgd","classes":"[\"no\",\"yes\"]"}},"at":12.5}');
INSERT INTO "record" VALUES(1,25,12.5,'RoundOpened','{"round":1,"selected":["f","e"],"epochs":5,"at":12.5}');
INSERT INTO "record" VALUES(1,26,20.0,'UpdateAccepted','{"round":1,"update":{"participant_id":"f","weights":{"ref":{"key":"1/f","size_bytes":128,"digest":"44444444444444444444444444444444"},"dtype":"float32","shape":[3],"first_bad":null},"num_samples":3}}');
INSERT INTO "record" VALUES(1,27,20.0,'UpdateAccepted','{"round":1,"update":{"participant_id":"e","weights":{"ref":{"key":"1/e","size_bytes":128,"digest":"44444444444444444444444444444444"},"dtype":"float32","shape":[3],"first_bad":null},"num_samples":3}}');
INSERT INTO "record" VALUES(1,28,20.0,'RoundClosed','{"round":1,"at":20.0}');
INSERT INTO "record" VALUES(1,29,21.0,'ModelPublished','{"round":1,"model":{"round":2,"ref":{"key":"2/global","size_bytes":152,"digest":"22222222222222222222222222222222"},"dtype":"float32","shape":[3],"layout":[{"name":"weights","shape":[1,3],"dtype":"float32"}],"metadata":{"workload":"sgd","classes":"[\"no\",\"yes\"]"}},"at":21.0}');
INSERT INTO "record" VALUES(1,30,21.0,'SessionFinished','{"cause":"completed","at":21.0}');
COMMIT;
