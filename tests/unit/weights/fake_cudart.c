/* Calls of the CUDA runtime that mcore_rl.weights.transports.ipc_memory uses, on host memory.
 *
 * As with a driver, the memory has no name: a handle is a process id and a descriptor of that process. A handle can be
 * opened several times, but not by the process that made it, and only while the GPU that holds the memory is current.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OUT_OF_MEMORY = 2, INVALID_VALUE = 1, NOT_OPENED = 201, BLOCK = 2 << 20 };

typedef struct { int process, descriptor, gpu; size_t size; char rest[64 - 3 * sizeof(int) - 4 - sizeof(size_t)]; } Handle;
typedef struct { void *pointer; Handle handle; int uses; } Memory;

static Memory memories[256];
static int current_gpu, last_error;
static char failing[32];
static int failing_status, failing_calls;

void fake_select(int gpu) { current_gpu = gpu; }
int fake_selected(void) { return current_gpu; }
void fake_fail(const char *name, int status, int calls) {
  snprintf(failing, sizeof failing, "%s", name);
  failing_status = status;
  failing_calls = calls;
}
int fake_memories(void) {
  int count = 0;
  for (int i = 0; i < 256; i++) count += memories[i].uses > 0;
  return count;
}
int fake_last_error(void) { return last_error; }

static int result(const char *name, int status) {
  if (failing_calls && !strcmp(name, failing)) {
    failing_calls--;
    status = failing_status;
  }
  if (status) last_error = status;
  return status;
}

int cudaGetLastError(void) {
  int error = last_error;
  last_error = 0;
  return error;
}
const char *cudaGetErrorString(int error) {
  switch (error) {
  case OUT_OF_MEMORY: return "out of memory";
  case NOT_OPENED: return "invalid device context";
  default: return "invalid argument";
  }
}
int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
int cudaDriverGetVersion(int *version) { *version = 13010; return 0; }
int cudaMemGetInfo(size_t *free, size_t *total) { *free = 3 << 20; *total = 1 << 30; return 0; }

static void *map(int descriptor, size_t size) {
  void *pointer = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  return pointer == MAP_FAILED ? NULL : pointer;
}
static int keep(void *pointer, Handle handle) {
  for (int i = 0; i < 256; i++)
    if (!memories[i].uses) {
      memories[i] = (Memory){pointer, handle, 1};
      return 0;
    }
  return OUT_OF_MEMORY;
}
static Memory *find(void *pointer) {
  for (int i = 0; i < 256; i++)
    if (memories[i].uses && memories[i].pointer == pointer) return &memories[i];
  return NULL;
}
static int release(void *pointer, int own) {
  Memory *memory = find(pointer);
  if (!memory || (memory->handle.process == getpid()) != own || memory->handle.gpu != current_gpu) return INVALID_VALUE;
  if (--memory->uses) return 0;
  munmap(pointer, memory->handle.size);
  if (own) close(memory->handle.descriptor);
  return 0;
}

int cudaMalloc(void **pointer, size_t size) {
  int status = result("cudaMalloc", size % BLOCK ? INVALID_VALUE : 0);
  if (status) return status;
  Handle handle = {getpid(), memfd_create("fake_gpu", MFD_CLOEXEC), current_gpu, size};
  if (ftruncate(handle.descriptor, size) || !(*pointer = map(handle.descriptor, size))) return OUT_OF_MEMORY;
  return keep(*pointer, handle);
}
int cudaFree(void *pointer) { return result("cudaFree", release(pointer, 1)); }

int cudaIpcGetMemHandle(Handle *handle, void *pointer) {
  Memory *memory = find(pointer);
  int status = result("cudaIpcGetMemHandle", memory && memory->handle.process == getpid() ? 0 : INVALID_VALUE);
  if (!status) *handle = memory->handle;
  return status;
}
int cudaIpcOpenMemHandle(void **pointer, Handle handle, unsigned flags) {
  int status = flags != 1 || handle.gpu != current_gpu ? INVALID_VALUE : handle.process == getpid() ? NOT_OPENED : 0;
  if ((status = result("cudaIpcOpenMemHandle", status))) return status;
  for (int i = 0; i < 256; i++)
    if (memories[i].uses && !memcmp(&memories[i].handle, &handle, sizeof handle)) {
      memories[i].uses++;
      *pointer = memories[i].pointer;
      return 0;
    }
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.process, handle.descriptor);
  int descriptor = open(path, O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return result("cudaIpcOpenMemHandle", INVALID_VALUE);
  *pointer = map(descriptor, handle.size);
  close(descriptor);
  return keep(*pointer, handle);
}
int cudaIpcCloseMemHandle(void *pointer) { return result("cudaIpcCloseMemHandle", release(pointer, 0)); }
