/* Stands in for NVIDIA's libnvidia-ml.so.1 in the nodes of a test cluster and in unit tests.
 *
 * The library answers from its control file: the file beside it that has its name and ".control". It reads the file
 * again when the file has changed, so a reading can change under a running program. Without the file, nvmlInit fails
 * as it does where the driver is not loaded. A program sees the same functions, structures and errors as with the
 * real library (nvml.h of CUDA 12 and 13). What the control file does not give is "not supported".
 *
 * A line has a key and values. Lines before the first "gpu" belong to the library, the others to that GPU:
 *
 *     driver 580.95.05
 *     gpu 0                        the index; GPUs are in order
 *     uuid GPU-4a1c...
 *     pci 00000000:3B:00.0
 *     name NVIDIA H100 80GB HBM3
 *     reasons 0x40                 clock event reasons
 *     violation 1 5000000 1.0      policy, nanoseconds, and how much of the time since the file was written to add
 *     temperature 91
 *     threshold 1 90               kind, degrees
 *     margin -1                    degrees to the slow-down
 *     power 350000                 milliwatts
 *     ecc 1 0 2                    1 uncorrected or 0 corrected, 0 volatile or 1 aggregate, count
 *     memory 7 2                   location (2 DRAM, 7 SRAM), uncorrected errors since the driver started
 *     sram-threshold 1             too many errors of the SRAM
 *     remapped 0 1 1 0             rows of corrected and of uncorrected errors, pending, failed
 *     retirement 1                 a page waits for its retirement
 *     mig 0                        1: the GPU is split
 *     framebuffer 1000 80000       bytes of memory that are used, and of how many
 *     busy 97                      percent of the time with a kernel on it
 *     pcie 5 16                    generation and width of the link
 *     max-pcie 5 16                the highest possible ones
 *     link 3 1 0 0 0 0             NVLink 3 is active: replays, recoveries, CRC errors, failed recoveries
 *     fabric 3 0 4a1c 7 0          state, its result, the cluster's id in hexadecimal, clique, health mask
 *     replays 12
 *     field 230 1                  a field value, as an unsigned 64-bit number
 *     error FUNCTION 15            this function returns an error; * is every function
 *     delay FUNCTION 0.5           this function sleeps first, in seconds
 *     hang FUNCTION                this function never returns
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    GPU_IS_LOST = 15,
    VERSION_MISMATCH = 25,
    MAX_GPUS = 16,
    MAX_LINES = 96,
    MAX_LINE = 160,
    MAX_WORD = 96,
    LINK_COUNT = 91, /* NVML_FI_DEV_NVLINK_LINK_COUNT */
    UNSIGNED_LONG_LONG = 3, /* nvmlValueType_t */
};

typedef struct {
    int count;
    char lines[MAX_LINES][MAX_LINE];
} section;

typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} pci_info;

typedef struct {
    unsigned long long reference_time, violation_time;
} violation_time;

typedef struct {
    unsigned long long total, free, used;
} memory_info;

typedef struct {
    unsigned gpu, memory;
} utilization;

typedef struct {
    unsigned version, sensor;
    int temperature;
} temperature_v1;

typedef struct {
    unsigned version;
    int margin;
} margin_v1;

typedef struct {
    unsigned version;
    unsigned char cluster[16];
    unsigned status, clique;
    unsigned char state;
    unsigned health_mask;
} fabric_v2;

typedef struct {
    unsigned version;
    unsigned long long counters[11];
    unsigned threshold_exceeded;
} sram_v1;

typedef struct {
    unsigned field, scope;
    long long timestamp, latency_us;
    unsigned value_type, result;
    unsigned long long value;
} field_value;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static section library, gpus[MAX_GPUS];
static char handles[MAX_GPUS]; /* their addresses are the handles of the GPUs */
static int gpu_count, is_initialized, has_file;
static struct stat read_file;

/* The control file. */

static void control_path(char *path, size_t size)
{
    Dl_info self;
    path[0] = 0;
    if (dladdr((void *)control_path, &self) && self.dli_fname)
        snprintf(path, size, "%s.control", self.dli_fname);
}

static void read_lines(FILE *file)
{
    char line[MAX_LINE];
    section *current = &library;
    memset(&library, 0, sizeof library);
    memset(gpus, 0, sizeof gpus);
    gpu_count = 0;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if (!strncmp(line, "gpu ", 4) && gpu_count < MAX_GPUS)
            current = &gpus[gpu_count++];
        else if (line[0] && line[0] != '#' && current->count < MAX_LINES)
            strcpy(current->lines[current->count++], line);
    }
}

static void refresh(void)
{
    char path[4096];
    struct stat now;
    FILE *file;
    control_path(path, sizeof path);
    if (stat(path, &now)) {
        has_file = 0;
        return;
    }
    if (has_file && now.st_ino == read_file.st_ino && now.st_size == read_file.st_size &&
        !memcmp(&now.st_mtim, &read_file.st_mtim, sizeof now.st_mtim))
        return;
    if (!(file = fopen(path, "r")))
        return;
    read_lines(file);
    fclose(file);
    read_file = now;
    has_file = 1;
}

/* The rest of the line of `where` that begins with `key`, from line *from on; NULL: there is none. */
static const char *find_next(const section *where, const char *key, int *from)
{
    size_t length = strlen(key);
    for (; *from < where->count; ++*from) {
        const char *line = where->lines[*from];
        if (!strncmp(line, key, length) && line[length] == ' ')
            return where->lines[(*from)++] + length + 1;
    }
    return NULL;
}

static const char *find(const section *where, const char *key)
{
    int from = 0;
    return find_next(where, key, &from);
}

/* The rest of the line of `key` whose first numbers are `first` and, if it is not negative, `second`. */
static const char *find_numbered(const section *where, const char *key, long first, long second)
{
    int from = 0;
    const char *rest;
    while ((rest = find_next(where, key, &from))) {
        char *end;
        if (strtol(rest, &end, 0) != first)
            continue;
        if (second < 0 || strtol(end, &end, 0) == second)
            return end;
    }
    return NULL;
}

/* Faults. */

static const char *find_fault(const section *where, const char *fault, const char *function)
{
    static _Thread_local char word[MAX_WORD];
    int from = 0;
    const char *rest;
    while ((rest = find_next(where, fault, &from))) {
        size_t length = strcspn(rest, " ");
        snprintf(word, sizeof word, "%.*s", (int)length, rest);
        if (!strcmp(word, "*") || !strcmp(word, function))
            return rest + length;
    }
    return NULL;
}

static void sleep_for(double seconds)
{
    struct timespec left = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    nanosleep(&left, NULL);
}

/* What the control file says about a call. Copies the section of the GPU, NULL for none, to `copy`. */
static int enter(const char *function, const void *handle, section *copy)
{
    long index = (const char *)handle - handles;
    const section *where = &library;
    const char *fault;
    double delay_s = 0;
    int hangs, result = SUCCESS;
    pthread_mutex_lock(&lock);
    refresh();
    if (!has_file)
        result = DRIVER_NOT_LOADED;
    else if (!is_initialized && strncmp(function, "nvmlInit", 8))
        result = UNINITIALIZED;
    else if (handle && (index < 0 || index >= MAX_GPUS))
        result = INVALID_ARGUMENT;
    else if (handle && index >= gpu_count)
        result = GPU_IS_LOST;
    else if (handle)
        where = &gpus[index];
    if ((fault = find_fault(where, "delay", function)))
        delay_s = strtod(fault, NULL);
    hangs = find_fault(where, "hang", function) != NULL;
    if (!result && (fault = find_fault(where, "error", function)))
        result = (int)strtol(fault, NULL, 0);
    if (copy)
        *copy = *where;
    pthread_mutex_unlock(&lock);
    if (delay_s > 0)
        sleep_for(delay_s);
    while (hangs)
        pause();
    return result;
}

#define ENTER_GPU(handle)                                   \
    section gpu;                                            \
    int result = enter(__func__, (handle), &gpu);           \
    if (result)                                             \
        return result;                                      \
    if (!(handle))                                          \
        return INVALID_ARGUMENT

static int give_text(const char *text, char *into, unsigned size)
{
    if (!text)
        return NOT_SUPPORTED;
    if (strlen(text) + 1 > size)
        return INSUFFICIENT_SIZE;
    strcpy(into, text);
    return SUCCESS;
}

static int give_unsigned(const char *text, unsigned *into)
{
    if (!text)
        return NOT_SUPPORTED;
    *into = (unsigned)strtol(text, NULL, 0);
    return SUCCESS;
}

static int give_long(const char *text, unsigned long long *into)
{
    if (!text)
        return NOT_SUPPORTED;
    *into = strtoull(text, NULL, 0);
    return SUCCESS;
}

/* The library. */

static int start(const char *function)
{
    int result = enter(function, NULL, NULL);
    if (!result)
        is_initialized = 1;
    return result;
}

int nvmlInit_v2(void) { return start(__func__); }
int nvmlInit(void) { return start(__func__); }
int nvmlInitWithFlags(unsigned flags) { return (void)flags, start(__func__); }

int nvmlShutdown(void)
{
    int result = enter(__func__, NULL, NULL);
    is_initialized = 0;
    return result;
}

const char *nvmlErrorString(int result)
{
    static const char *const names[] = {"Success",        "Uninitialized",     "Invalid Argument",  "Not Supported",
                                        "No Permission",  "Already Initialized", "Not Found",       "Insufficient Size",
                                        "Insufficient External Power", "Driver Not Loaded", "Timeout", "IRQ Issue",
                                        "NVML Shared Library Not Found", "Function Not Found", "Corrupted infoROM",
                                        "GPU is lost",    "GPU requires restart"};
    return result >= 0 && result < (int)(sizeof names / sizeof *names) ? names[result] : "Unknown Error";
}

int nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    section copy;
    int result = enter(__func__, NULL, &copy);
    return result ? result : give_text(find(&copy, "driver"), version, length);
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    int result = enter(__func__, NULL, NULL);
    if (!result)
        *count = (unsigned)gpu_count;
    return result;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    int result = enter(__func__, NULL, NULL);
    if (result)
        return result;
    if (index >= (unsigned)gpu_count)
        return INVALID_ARGUMENT;
    *handle = &handles[index];
    return enter(__func__, *handle, NULL);
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **handle)
{
    int result = enter(__func__, NULL, NULL);
    for (int index = 0; !result && index < gpu_count; ++index) {
        const char *known = find(&gpus[index], "pci");
        if (known && !strcasecmp(known, bus_id))
            return *handle = &handles[index], SUCCESS;
    }
    return result ? result : NOT_FOUND;
}

/* One GPU. */

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length)
{
    ENTER_GPU(handle);
    return give_text(find(&gpu, "uuid"), uuid, length);
}

int nvmlDeviceGetName(void *handle, char *name, unsigned length)
{
    ENTER_GPU(handle);
    return give_text(find(&gpu, "name"), name, length);
}

int nvmlDeviceGetPciInfo_v3(void *handle, pci_info *info)
{
    unsigned function = 0;
    ENTER_GPU(handle);
    const char *bus_id = find(&gpu, "pci");
    memset(info, 0, sizeof *info);
    if (!bus_id || sscanf(bus_id, "%x:%x:%x.%x", &info->domain, &info->bus, &info->device, &function) != 4)
        return NOT_SUPPORTED;
    snprintf(info->busId, sizeof info->busId, "%s", bus_id);
    snprintf(info->busIdLegacy, sizeof info->busIdLegacy, "%04X:%02X:%02X.%X", info->domain & 0xffff,
             info->bus & 0xff, info->device & 0xff, function & 0xf);
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *reasons)
{
    ENTER_GPU(handle);
    return give_long(find(&gpu, "reasons"), reasons);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *reasons)
{
    ENTER_GPU(handle);
    return give_long(find(&gpu, "reasons"), reasons);
}

int nvmlDeviceGetViolationStatus(void *handle, unsigned policy, violation_time *status)
{
    char *end;
    struct timespec now;
    ENTER_GPU(handle);
    const char *text = find_numbered(&gpu, "violation", policy, -1);
    if (!text)
        return NOT_SUPPORTED;
    clock_gettime(CLOCK_REALTIME, &now);
    double since_ns = (now.tv_sec - read_file.st_mtim.tv_sec) * 1e9 + (now.tv_nsec - read_file.st_mtim.tv_nsec);
    unsigned long long base_ns = strtoull(text, &end, 0);
    status->violation_time = base_ns + (unsigned long long)(strtod(end, NULL) * (since_ns > 0 ? since_ns : 0));
    status->reference_time = now.tv_sec * 1000000ULL + now.tv_nsec / 1000;
    return SUCCESS;
}

int nvmlDeviceGetTemperature(void *handle, unsigned sensor, unsigned *temperature)
{
    ENTER_GPU(handle);
    return sensor ? INVALID_ARGUMENT : give_unsigned(find(&gpu, "temperature"), temperature);
}

int nvmlDeviceGetTemperatureV(void *handle, temperature_v1 *temperature)
{
    ENTER_GPU(handle);
    if (temperature->version != (sizeof *temperature | 1U << 24))
        return VERSION_MISMATCH;
    return give_unsigned(find(&gpu, "temperature"), (unsigned *)&temperature->temperature);
}

int nvmlDeviceGetTemperatureThreshold(void *handle, unsigned kind, unsigned *temperature)
{
    ENTER_GPU(handle);
    return give_unsigned(find_numbered(&gpu, "threshold", kind, -1), temperature);
}

int nvmlDeviceGetMarginTemperature(void *handle, margin_v1 *margin)
{
    ENTER_GPU(handle);
    if (margin->version != (sizeof *margin | 1U << 24))
        return VERSION_MISMATCH;
    return give_unsigned(find(&gpu, "margin"), (unsigned *)&margin->margin);
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts)
{
    ENTER_GPU(handle);
    return give_unsigned(find(&gpu, "power"), milliwatts);
}

int nvmlDeviceGetTotalEccErrors(void *handle, unsigned kind, unsigned counter, unsigned long long *count)
{
    ENTER_GPU(handle);
    return give_long(find_numbered(&gpu, "ecc", kind, counter), count);
}

int nvmlDeviceGetMemoryErrorCounter(void *handle, unsigned kind, unsigned counter, unsigned where,
                                    unsigned long long *count)
{
    ENTER_GPU(handle);
    if (kind != 1 || counter)
        return NOT_SUPPORTED;
    return give_long(find_numbered(&gpu, "memory", where, -1), count);
}

int nvmlDeviceGetMemoryInfo(void *handle, memory_info *memory)
{
    ENTER_GPU(handle);
    const char *text = find(&gpu, "framebuffer");
    if (!text || sscanf(text, "%llu %llu", &memory->used, &memory->total) != 2)
        return NOT_SUPPORTED;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *handle, utilization *rates)
{
    ENTER_GPU(handle);
    rates->memory = 0;
    return give_unsigned(find(&gpu, "busy"), &rates->gpu);
}

int nvmlDeviceGetRemappedRows(void *handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failed)
{
    ENTER_GPU(handle);
    const char *text = find(&gpu, "remapped");
    if (!text || sscanf(text, "%u %u %u %u", corrected, uncorrected, pending, failed) != 4)
        return NOT_SUPPORTED;
    return SUCCESS;
}

int nvmlDeviceGetCurrPcieLinkGeneration(void *handle, unsigned *generation)
{
    ENTER_GPU(handle);
    return give_unsigned(find(&gpu, "pcie"), generation);
}

int nvmlDeviceGetCurrPcieLinkWidth(void *handle, unsigned *width)
{
    ENTER_GPU(handle);
    const char *text = find(&gpu, "pcie");
    return give_unsigned(text ? strchr(text, ' ') : NULL, width);
}

int nvmlDeviceGetPcieReplayCounter(void *handle, unsigned *replays)
{
    ENTER_GPU(handle);
    return give_unsigned(find(&gpu, "replays"), replays);
}

int nvmlDeviceGetMaxPcieLinkGeneration(void *handle, unsigned *generation)
{
    ENTER_GPU(handle);
    return give_unsigned(find(&gpu, "max-pcie"), generation);
}

int nvmlDeviceGetMaxPcieLinkWidth(void *handle, unsigned *width)
{
    ENTER_GPU(handle);
    const char *text = find(&gpu, "max-pcie");
    return give_unsigned(text ? strchr(text, ' ') : NULL, width);
}

int nvmlDeviceGetRetiredPagesPendingStatus(void *handle, unsigned *pending)
{
    ENTER_GPU(handle);
    return give_unsigned(find(&gpu, "retirement"), pending);
}

int nvmlDeviceGetSramEccErrorStatus(void *handle, sram_v1 *status)
{
    ENTER_GPU(handle);
    if (status->version != (sizeof *status | 1U << 24))
        return VERSION_MISMATCH;
    return give_unsigned(find(&gpu, "sram-threshold"), &status->threshold_exceeded);
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending)
{
    ENTER_GPU(handle);
    *pending = 0;
    return give_unsigned(find(&gpu, "mig"), current);
}

int nvmlDeviceGetNvLinkState(void *handle, unsigned link, unsigned *is_active)
{
    ENTER_GPU(handle);
    if (!find(&gpu, "link"))
        return NOT_SUPPORTED;
    const char *text = find_numbered(&gpu, "link", link, -1);
    return text ? give_unsigned(text, is_active) : INVALID_ARGUMENT;
}

int nvmlDeviceGetGpuFabricInfoV(void *handle, fabric_v2 *info)
{
    char cluster[33] = "";
    unsigned state = 0;
    ENTER_GPU(handle);
    const char *text = find(&gpu, "fabric");
    if (info->version != (sizeof *info | 2U << 24))
        return VERSION_MISMATCH;
    if (!text || sscanf(text, "%u %u %32s %u %i", &state, &info->status, cluster, &info->clique,
                        (int *)&info->health_mask) != 5)
        return NOT_SUPPORTED;
    info->state = (unsigned char)state;
    memset(info->cluster, 0, sizeof info->cluster);
    for (size_t each = 0; cluster[2 * each] && cluster[2 * each + 1]; ++each)
        sscanf(cluster + 2 * each, "%2hhx", &info->cluster[each]);
    return SUCCESS;
}

/* The number of the column of a "link" line that a field reports; 0: the field is not about one link. */
static int link_column(unsigned field)
{
    static const unsigned fields[] = {161, 162, 163, 214};
    for (int each = 0; each < 4; ++each)
        if (fields[each] == field)
            return each + 2;
    return 0;
}

static int give_column(const char *text, int column, unsigned long long *into)
{
    for (; text && column > 1; --column)
        text = strchr(text + 1, ' ');
    return give_long(text, into);
}

static int give_link_count(const section *gpu, unsigned long long *into)
{
    int from = 0;
    for (*into = 0; find_next(gpu, "link", &from); ++*into)
        ;
    return *into ? SUCCESS : NOT_SUPPORTED;
}

static int give_field(const section *gpu, unsigned field, unsigned scope, unsigned long long *into)
{
    int column = link_column(field);
    if (column)
        return give_column(find_numbered(gpu, "link", scope, -1), column, into);
    if (field == LINK_COUNT)
        return give_link_count(gpu, into);
    return give_long(find_numbered(gpu, "field", field, -1), into);
}

int nvmlDeviceGetFieldValues(void *handle, int count, field_value *values)
{
    ENTER_GPU(handle);
    for (int each = 0; each < count; ++each) {
        values[each].value_type = UNSIGNED_LONG_LONG;
        values[each].result = (unsigned)give_field(&gpu, values[each].field, values[each].scope, &values[each].value);
    }
    return SUCCESS;
}

/* Functions that the real library has, and that this GPU does not support. */

#define UNSUPPORTED(function) \
    int function(void) { return NOT_SUPPORTED; }
UNSUPPORTED(nvmlDeviceGetFanSpeed)
UNSUPPORTED(nvmlDeviceGetRetiredPages)
UNSUPPORTED(nvmlDeviceGetRowRemapperHistogram)
