/* The driver's answers that PyTorch's autograd engine asks for before it takes CUDA tensors: eight devices, one stream. */
int cudaGetDeviceCount(int *count) { *count = 8; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) { (void)device; return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { (void)device; *flags = 0; *active = 0; return 0; }
