#!/bin/bash
# zinf train on several hosts, one process a GPU. Submit with, for example:
#
#   sbatch --nodes=4 scripts/launch/slurm_train.sh configs/gpt_13b_1xh200.yaml
#
# srun tells each process its place, and the first host of the job is the coordinator.
# run.output must be on storage that all hosts share; memory.nvme is each host's own.

#SBATCH --job-name=zinf
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# Five minutes before the time is over: complete the step, save, end; then queue again.
#SBATCH --signal=INT@300
#SBATCH --requeue

set -euo pipefail

# By which the processes know one another: others on the network cannot end the run.
# srun hands it on; it is no argument of a command, so other users do not see it.
export ZINF_SECRET=${ZINF_SECRET:-$(head -c 32 /dev/urandom | base64)}

# A process that ends with an error ends all others by itself; srun need not kill them,
# but must not wait for what is left of a host that is gone.
srun --label --kill-on-bad-exit=1 \
    zinf train "$@" --set run.resume=true
