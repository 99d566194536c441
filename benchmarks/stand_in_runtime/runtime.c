/* A CUDA runtime in which no kernel runs, for PyTorch's own CUDA build on a computer without a GPU.
 *
 * Emulated, because ATen's, CUB's and the caching allocator's host code decide by it: the properties of one card (given in
 * the environment as STAND_IN_...), device memory (pages of the host, counted against the card's total), copies and small
 * fills, the kind of a pointer, streams and events as mere numbers, and occupancy (how many blocks fit on a multiprocessor).
 *
 * Not emulated: kernels. A launch succeeds and changes nothing, so what a kernel would have written stays as it was: zero in
 * fresh memory. Where the host reads one number of 4 or 8 bytes back to choose a size, STAND_IN_TOLD is what it reads. Kernels
 * that PyTorch compiles when they are first used (prod) work with 2.6; in 2.11 and 2.13 NVRTC ends the process.
 *
 * Every other function of the runtime and of cuBLAS, cuFFT, cuSPARSE and cuSOLVER returns 0, which is success to each of them
 * (see building.py): nobody asks for the result of what was never computed, and streams are always idle. These libraries'
 * handles must be numbers other than null, and a matrix product must be told that there is an algorithm.
 */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#undef cudaGetDeviceProperties /* a macro in CUDA 12; both names are asked for */

#define ALIGNMENT ((size_t)2 << 20) /* cudaMalloc of segments returns addresses of 2 MiB */
#define COPIED ((size_t)4 << 20)    /* larger fills and copies inside the device cost time and decide nothing */
#define REGISTERS 32                /* of a kernel for each thread: a usual figure, not each kernel's own */

static long long setting(const char *name, long long otherwise) {
    const char *value = getenv(name);
    return value ? atoll(value) : otherwise;
}

/* The card */

static int capability(void) { return setting("STAND_IN_CAPABILITY", 80); }
static size_t total(void) { return setting("STAND_IN_TOTAL", 40LL << 30); }

static int blocks(void) { /* of a multiprocessor: "maximum resident blocks" in the CUDA programming guide */
    int c = capability();
    return c == 75 || c == 86 || c == 87 ? 16 : c == 89 || c == 120 ? 24 : 32;
}

static void describe(struct cudaDeviceProp *card) {
    memset(card, 0, sizeof *card);
    strncpy(card->name, getenv("STAND_IN_NAME") ? getenv("STAND_IN_NAME") : "stand-in", sizeof card->name - 1);
    card->major = capability() / 10;
    card->minor = capability() % 10;
    card->totalGlobalMem = total();
    card->multiProcessorCount = setting("STAND_IN_MULTIPROCESSORS", 108);
    card->maxThreadsPerMultiProcessor = setting("STAND_IN_THREADS", 2048);
    card->maxBlocksPerMultiProcessor = blocks();
    card->sharedMemPerMultiprocessor = setting("STAND_IN_SHARED", 167936);
    card->sharedMemPerBlockOptin = setting("STAND_IN_SHARED_OPTIN", 166912);
    card->l2CacheSize = setting("STAND_IN_L2", 40 << 20);
    card->sharedMemPerBlock = 49152; /* from here on the same for every card since compute capability 7.5 */
    card->regsPerBlock = card->regsPerMultiprocessor = 65536;
    card->warpSize = 32;
    card->maxThreadsPerBlock = card->maxThreadsDim[0] = card->maxThreadsDim[1] = 1024;
    card->maxThreadsDim[2] = 64;
    card->maxGridSize[0] = 2147483647;
    card->maxGridSize[1] = card->maxGridSize[2] = 65535;
    card->textureAlignment = 512;
    card->unifiedAddressing = card->concurrentKernels = card->cooperativeLaunch = 1;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *card, int device) { describe(card); return cudaSuccess; }
cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp *card, int device) { describe(card); return cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp card;
    describe(&card);
    const int known[256] = {
        [cudaDevAttrComputeCapabilityMajor] = card.major, [cudaDevAttrComputeCapabilityMinor] = card.minor,
        [cudaDevAttrMultiProcessorCount] = card.multiProcessorCount, [cudaDevAttrWarpSize] = card.warpSize,
        [cudaDevAttrMaxThreadsPerBlock] = card.maxThreadsPerBlock,
        [cudaDevAttrMaxThreadsPerMultiProcessor] = card.maxThreadsPerMultiProcessor,
        [cudaDevAttrMaxBlocksPerMultiprocessor] = card.maxBlocksPerMultiProcessor,
        [cudaDevAttrMaxSharedMemoryPerBlock] = card.sharedMemPerBlock,
        [cudaDevAttrMaxSharedMemoryPerBlockOptin] = card.sharedMemPerBlockOptin,
        [cudaDevAttrMaxSharedMemoryPerMultiprocessor] = card.sharedMemPerMultiprocessor,
        [cudaDevAttrReservedSharedMemoryPerBlock] = 1024,
        [cudaDevAttrMaxRegistersPerBlock] = card.regsPerBlock,
        [cudaDevAttrMaxRegistersPerMultiprocessor] = card.regsPerMultiprocessor,
        [cudaDevAttrMaxGridDimX] = card.maxGridSize[0], [cudaDevAttrMaxGridDimY] = card.maxGridSize[1],
        [cudaDevAttrMaxGridDimZ] = card.maxGridSize[2], [cudaDevAttrMaxBlockDimX] = card.maxThreadsDim[0],
        [cudaDevAttrMaxBlockDimY] = card.maxThreadsDim[1], [cudaDevAttrMaxBlockDimZ] = card.maxThreadsDim[2],
        [cudaDevAttrL2CacheSize] = card.l2CacheSize, [cudaDevAttrTextureAlignment] = card.textureAlignment,
        [cudaDevAttrUnifiedAddressing] = 1, [cudaDevAttrCooperativeLaunch] = 1,
    };
    *value = (unsigned)attribute < 256 ? known[attribute] : 0;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int one, int other) { *can = 0; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int device) { strncpy(id, "0000:00:00.0", size); return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t error) { return "an error of the stand-in runtime"; }
const char *cudaGetErrorName(cudaError_t error) { return "cudaErrorOfTheStandIn"; }

/* Memory */

static struct { char *start; size_t size; } segments[100000];
static int count;
static size_t used;

static int on_device(const void *pointer) {
    for (int i = 0; i < count; i++)
        if ((char *)pointer >= segments[i].start && (char *)pointer < segments[i].start + segments[i].size) return 1;
    return 0;
}

cudaError_t cudaMalloc(void **pointer, size_t size) {
    *pointer = 0;
    if (used + size > total() || count == 100000) return cudaErrorMemoryAllocation;
    char *pages = mmap(0, size + ALIGNMENT, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) return cudaErrorMemoryAllocation;
    *pointer = segments[count].start = (char *)(((size_t)pages + ALIGNMENT - 1) & ~(ALIGNMENT - 1));
    segments[count++].size = size;
    used += size;
    return cudaSuccess;
}

cudaError_t cudaFree(void *pointer) {
    for (int i = 0; i < count; i++)
        if (segments[i].start == pointer) {
            used -= segments[i].size;
            munmap(pointer, segments[i].size);
            segments[i] = segments[--count];
            break;
        }
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *all) { *all = total(); *free = *all - used; return cudaSuccess; }
cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    return posix_memalign(pointer, 4096, size) ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaFreeHost(void *pointer) { free(pointer); return cudaSuccess; }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    memset(attributes, 0, sizeof *attributes);
    if (on_device(pointer)) {
        attributes->type = cudaMemoryTypeDevice;
        attributes->devicePointer = (void *)pointer;
    }
    return cudaSuccess;
}

static void copy(void *to, const void *from, size_t size) {
    if (on_device(to) && on_device(from) && size > COPIED) return;
    memmove(to, from, size);
    if (!getenv("STAND_IN_TOLD") || on_device(to) || !on_device(from)) return;
    if (size == 4) *(int *)to = setting("STAND_IN_TOLD", 0);
    if (size == 8) *(long long *)to = setting("STAND_IN_TOLD", 0);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) { copy(to, from, size); return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    copy(to, from, size);
    return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t i = 0; i < height; i++) memmove((char *)to + i * to_pitch, (char *)from + i * from_pitch, width);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *to, int value, size_t size) {
    if (size <= COPIED) memset(to, value, size);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) { return cudaMemset(to, value, size); }
static char symbols[1 << 20];
cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) { *pointer = symbols; return cudaSuccess; }

/* Streams and events: numbers */

static size_t last = 0x1000;
static int number(void *handle) { *(size_t *)handle = last += 16; return 0; }

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return number(stream); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return number(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) { return number(stream); }
cudaError_t cudaEventCreate(cudaEvent_t *event) { return number(event); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return number(event); }
cudaError_t cudaEventElapsedTime(float *time, cudaEvent_t start, cudaEvent_t end) { *time = 1; return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
/* Their further arguments differ between versions; the second is the same. */
int capture_info(void *stream, int *status) __asm__("cudaStreamGetCaptureInfo");
int capture_info(void *stream, int *status) { *status = 0; return 0; }
int capture_info_v2(void *stream, int *status) __asm__("cudaStreamGetCaptureInfo_v2");
int capture_info_v2(void *stream, int *status) { *status = 0; return 0; }

/* Kernels: what is asked about them before a launch */

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
    memset(attributes, 0, sizeof *attributes);
    attributes->ptxVersion = attributes->binaryVersion = capability(); /* CUB chooses its policy by this */
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = REGISTERS;
    attributes->maxDynamicSharedSizeBytes = 49152;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t shared) {
    struct cudaDeviceProp card;
    describe(&card);
    int warps = (threads + 31) / 32;
    int by_registers = card.regsPerMultiprocessor / ((REGISTERS * 32 + 255) / 256 * 256 * warps);
    *blocks = card.maxThreadsPerMultiProcessor / (warps * 32);
    if (by_registers < *blocks) *blocks = by_registers;
    if (card.maxBlocksPerMultiProcessor < *blocks) *blocks = card.maxBlocksPerMultiProcessor;
    int by_shared = card.sharedMemPerMultiprocessor / (shared + 1024);
    if (shared && by_shared < *blocks) *blocks = by_shared;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads, size_t shared,
                                                                   unsigned flags) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, shared);
}

static __thread struct { dim3 grid, block; size_t shared; void *stream; } launches[16]; /* what <<<...>>> compiles to */
static __thread int depth;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    launches[depth].grid = grid, launches[depth].block = block;
    launches[depth].shared = shared, launches[depth++].stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = launches[--depth].grid, *block = launches[depth].block;
    *shared = launches[depth].shared, *(void **)stream = launches[depth].stream;
    return cudaSuccess;
}
static void *binary[8];
void **__cudaRegisterFatBinary(void *content) { return binary; }

static int nothing(void) { return 0; }
int entry_point(const char *name, void **function, unsigned long long flags, int *found) __asm__("cudaGetDriverEntryPoint");
int entry_point(const char *name, void **function, unsigned long long flags, int *found) {
    *function = (void *)nothing;
    if (found) *found = 0;
    return 0;
}
int entry_point_of(const char *name, void **function, unsigned version, unsigned long long flags, int *found)
    __asm__("cudaGetDriverEntryPointByVersion");
int entry_point_of(const char *name, void **function, unsigned version, unsigned long long flags, int *found) {
    return entry_point(name, function, flags, found);
}

/* Libraries */

#define HANDLE(function) int function(void **handle) { return number(handle); }
HANDLE(cublasCreate_v2) HANDLE(cublasLtCreate) HANDLE(cublasLtMatmulDescCreate) HANDLE(cublasLtMatrixLayoutCreate)
HANDLE(cublasLtMatmulPreferenceCreate) HANDLE(cusparseCreate) HANDLE(cusolverDnCreate)
int cufftCreate(int *plan) { *plan = 1; return 0; }
int cufftXtMakePlanMany(int plan, int rank, void *n, void *inembed, long long istride, long long idist, int itype, void *onembed,
                        long long ostride, long long odist, int otype, long long batch, size_t *work, int etype) {
    *work = 0; /* how much it takes, only cuFFT knows */
    return 0;
}
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetStream_v2(void *handle, void **stream) { *stream = 0; return 0; }
size_t cublasLtGetVersion(void) { return CUDART_VERSION * 10; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference, int wanted,
                                   void *results, int *found) {
    *found = 1;
    return 0;
}
