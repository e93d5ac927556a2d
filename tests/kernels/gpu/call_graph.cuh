// A graph of calls, for the check programs in this folder.
#pragma once

#include <algorithm>
#include <vector>

#include "gpu/check.cuh"

// Calls that are captured in a CUDA graph.
class CallGraph {
 public:
  // launch(i) enqueues call i and returns its status.
  template <typename Launch>
  CallGraph(int count, cudaStream_t stream, Launch launch) : count(count), stream(stream) {
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < count; ++i) CHECK(launch(i));
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&calls, graph, 0));
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&stop));
  }
  CallGraph(const CallGraph&) = delete;
  ~CallGraph() {
    CHECK(cudaGraphExecDestroy(calls));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaEventDestroy(start));
    CHECK(cudaEventDestroy(stop));
  }
  void replay() const { CHECK(cudaGraphLaunch(calls, stream)); }
  // Returns the times of one call, in microseconds, in ascending order. Two more rounds come first.
  std::vector<float> times(int rounds) const {
    std::vector<float> us;
    for (int i = 0; i < rounds + 2; ++i) {
      CHECK(cudaEventRecord(start, stream));
      replay();
      CHECK(cudaEventRecord(stop, stream));
      CHECK(cudaEventSynchronize(stop));
      float ms;
      CHECK(cudaEventElapsedTime(&ms, start, stop));
      if (i >= 2) us.push_back(ms * 1e3f / count);
    }
    std::sort(us.begin(), us.end());
    return us;
  }

 private:
  int count;
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t calls;
  cudaEvent_t start, stop;
};
