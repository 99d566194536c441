/* What `test_cudnn_library.py` asks in cuDNN's place: four plans for every convolution on compute capability 8.0.
 *
 * Three come from the instant heuristics, one from the fallback ones. The first lowers precision, the second runs on tensor cores, the
 * fourth is not deterministic. A plan takes a million bytes times its place, and the input's stride over channels. For 7.5 no plan
 * is made of the third; any other card is refused, but 9.0, at which the process ends.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define REFUSED 3000

typedef struct Descriptor {
    int kind, mode, place, fails;
    int64_t name, stride;
    struct Descriptor *of;
} Descriptor;

static int capability;

size_t cudnnGetVersion(void) { return VERSION; }

int cudnnBackendCreateDescriptor(int kind, Descriptor **made) {
    *made = calloc(1, sizeof **made);
    (*made)->kind = kind;
    return 0;
}

int cudnnBackendDestroyDescriptor(Descriptor *one) {
    free(one);
    return 0;
}

int cudnnBackendSetAttribute(Descriptor *one, int attribute, int type, int64_t count, const void *values) {
    if (attribute == 2702) {
        char *text = strndup(values, count);
        capability = atoi(strstr(text, "\"deviceVer\": ") + 13);
        free(text);
    }
    if (attribute == 906) one->name = *(const int64_t *)values;
    if (attribute == 903) one->stride = ((const int64_t *)values)[1];
    if (attribute == 200) one->mode = *(const int *)values;
    if (type == 15 && attribute != 702) {
        Descriptor *other = *(Descriptor *const *)values;
        if (other->kind != 17 || other->name == 'x') one->of = attribute == 204 || attribute == 407 ? one->of : other;
    }
    return 0;
}

int cudnnBackendFinalize(Descriptor *one) {
    if (one->kind == 38 && capability == 900) abort();
    if (one->kind == 38 && capability != 800 && capability != 750) return REFUSED;
    return one->kind == 5 && capability == 750 && one->of->place == 3 ? REFUSED : 0;
}

static int64_t stride_of(const Descriptor *one) { return one->kind == 17 ? one->stride : stride_of(one->of); }

int cudnnBackendGetAttribute(Descriptor *one, int attribute, int type, int64_t most, int64_t *count, void *values) {
    static const int notes[] = {-1, 1, 0, -1, 4};
    if (attribute == 202) {
        *count = one->mode == 0 ? 3 : 1;
        for (int64_t i = 0; i < *count && i < most; i++) {
            ((Descriptor **)values)[i]->place = one->mode == 0 ? i + 1 : 4;
            ((Descriptor **)values)[i]->of = one->of;
        }
    }
    if (attribute == 300) {
        (*(Descriptor **)values)->place = one->place;
        *count = 1;
    }
    if (attribute == 1303) {
        *count = notes[one->place] >= 0;
        if (*count) *(int *)values = notes[one->place];
    }
    if (attribute == 402) {
        *(int64_t *)values = one->of->place * 1000000 + stride_of(one->of->of);
        *count = 1;
    }
    return 0;
}
