"""Trackers: tensorboard, wandb, mlflow, trackio and swanlab behind one Protocol.

RunJournal --step, metrics--> Trackers --bounded queue, one thread per tracker--> Tracker

interface     the Protocol, and the facts and responses that trackers receive
tensorboard   ... one module per tracker
registry      tracker by name: its package, its login and its constructor
check         messages about missing packages and logins, before the run starts
delivery      the queue and the thread of one tracker; counts of dropped and failed entries
group         all trackers of a run, as the journal uses them
run_facts     configuration, code revision and package versions
run_ids       ids under which a resumed run continues, in run.dir/trackers/ids.json
responses     a few responses of a step, read from rollouts/
"""
