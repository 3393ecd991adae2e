// What OnDevice calls of CUDA, for a test without it: device_test.cc defines these.

#pragma once

using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;

cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);
