#!/bin/bash
# Training on two hosts of Slurm: sbatch slurm.sh
#
# srun starts one launcher on each host, with the same command. The first host leads; Slurm sets
# SLURM_NODEID to the number of each host.

#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append  # a requeued job does not overwrite its output
# Before the time limit, each launcher gets SIGTERM: jdp saves a checkpoint, and the exit code is
# 75.
#SBATCH --signal=TERM@120

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
JDP_TOKEN=$(openssl rand -hex 16)
export JDP_TOKEN
# Since 22.05, srun would give each task one CPU.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
port=$((20000 + SLURM_JOB_ID % 10000))  # other jobs, as those of an array, may share the host

# One process on each host drives all of its GPUs. A failed host ends only its own launcher.
srun --kill-on-bad-exit=0 \
    jdp run --nnodes "$SLURM_NNODES" --rdzv-endpoint "$first:$port" \
    --shutdown-timeout 100 --resume train.py
code=$?

if [ $code -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
